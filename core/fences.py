"""Blocks that nobody owns any more and that a step in flight still touches.

They keep their reference until the last such step is finished; only then may the pool give them
to somebody else. Owned by the scheduler.
"""

import msgspec

from cearx.core.block_pool import BlockPool
from cearx.core.identifiers import BlockId, StepId


class Fence(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    last_step: StepId
    """The last step in flight with a row that reads or writes these blocks."""
    block_ids: tuple[BlockId, ...]


class Fences:
    """In the order in which they were set up."""

    def __init__(self, pool: BlockPool, fences: tuple[Fence, ...] = ()) -> None:
        self._pool = pool
        self._fences = list(fences)

    def __len__(self) -> int:
        return len(self._fences)

    def all(self) -> tuple[Fence, ...]:
        return tuple(self._fences)

    def add(self, last_step: StepId, block_ids: list[BlockId]) -> None:
        if block_ids:
            self._fences.append(Fence(last_step=last_step, block_ids=tuple(block_ids)))

    def release(self, finished: StepId) -> bool:
        """Frees what no step after `finished` touches; answers whether that was anything."""
        kept = [fence for fence in self._fences if fence.last_step > finished]
        if len(kept) == len(self._fences):
            return False
        for fence in self._fences:
            if fence.last_step <= finished:
                self._pool.release(fence.block_ids)
        self._fences = kept
        return True
