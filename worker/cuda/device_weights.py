"""Weights on the device as the kernels read them, filled tensor by tensor from a checkpoint.

Owns the merging of matrices with one input into one and the names of their parts, and asks for the
rounding of those that are kept in 8 bits; computes nothing. Built by `decoder.py`.
N output features, K input features.
"""

from functools import partial

import torch
from torch import Tensor

from cearx.kernels.fp8_weight import Fp8Weight
from cearx.worker.weights import WeightSlot


class MergedWeight:
    """One matrix [N, K] with the rows of all parts, and its bias if there is one."""

    def __init__(
        self,
        parts: tuple[tuple[str, int], ...],
        in_features: int,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8: bool = False,
    ) -> None:
        """`parts` are (name, rows); a weight that is not merged has one without a name.

        `fp8` keeps the matrix, but not its bias, in 8 bits.
        """
        num_rows = sum(size for _, size in parts)
        self._parts = parts
        self.weight: Tensor | Fp8Weight
        """As products take it."""
        if fp8:
            self.weight = Fp8Weight.empty(num_rows, in_features, dtype, device)
        else:
            self.weight = torch.empty(num_rows, in_features, dtype=dtype, device=device)
        self.bias_N = torch.empty(num_rows, dtype=dtype, device=device) if has_bias else None

    @property
    def weight_NK(self) -> Tensor:
        """The matrix where it is not rounded."""
        assert isinstance(self.weight, Tensor), "a matrix in 8 bits has no exact rows"
        return self.weight

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes if isinstance(self.weight, Tensor) else self.weight.num_bytes

    def slots(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        first = 0
        for name, size in self._parts:
            prefix = f"{name}." if name else ""
            slots[f"{prefix}weight"] = self._matrix_slot(first, size)
            if self.bias_N is not None:
                rows_N = self.bias_N[first : first + size]
                slots[f"{prefix}bias"] = WeightSlot((size,), partial(_fill, rows_N))
            first += size
        return slots

    def _matrix_slot(self, first: int, size: int) -> WeightSlot:
        if isinstance(self.weight, Tensor):
            rows_NK = self.weight[first : first + size]
            return WeightSlot(tuple(rows_NK.shape), partial(_fill, rows_NK))
        rows = self.weight.rows(first, size)
        return WeightSlot(tuple(rows.shape), rows.store, kept_as={"fp8": rows.num_bytes})


class NormWeight:
    """The weights of one or several norms of the same width, by part."""

    def __init__(
        self, names: tuple[str, ...], size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.parts = {name: torch.empty(size, dtype=dtype, device=device) for name in names}

    def slots(self) -> dict[str, WeightSlot]:
        return {
            f"{name}.weight" if name else "weight": WeightSlot(
                tuple(part.shape), partial(_fill, part)
            )
            for name, part in self.parts.items()
        }


def _fill(place: Tensor, tensor: Tensor) -> None:
    place.copy_(tensor)
