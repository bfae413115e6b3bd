"""How a model's weights are split over ranks, and the two collectives that this needs.

Owns the interface and the single-rank case; never starts processes or groups. Layers ask for their
share when they are built and call the collectives where partial results meet.
"""

from typing import Protocol

from torch import Tensor


class TensorParallel(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over ranks, on every rank; may reuse `partial`."""
        ...

    def all_gather(self, shard: Tensor) -> Tensor:
        """The ranks' shards side by side along the last dimension, on every rank."""
        ...


class SingleRank:
    """The whole model in one process: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, shard: Tensor) -> Tensor:
        return shard


def shard_size(total: int, tp: TensorParallel, what: str) -> int:
    """This rank's share of `total`; raises ValueError when it does not divide."""
    if total % tp.size:
        raise ValueError(f"{what} {total} is not a multiple of tensor_parallel_size {tp.size}")
    return total // tp.size
