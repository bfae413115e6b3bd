"""Weights on the device as the kernels read them, filled tensor by tensor from a checkpoint.

Owns the merging of matrices with one input into one and the names of their parts; computes nothing.
Built by `decoder.py`. N output features, K input features.
"""

from functools import partial

import torch
from torch import Tensor

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
    ) -> None:
        """`parts` are (name, rows); a weight that is not merged has one without a name."""
        num_rows = sum(size for _, size in parts)
        self._parts = parts
        self.weight_NK = torch.empty(num_rows, in_features, dtype=dtype, device=device)
        self.bias_N = torch.empty(num_rows, dtype=dtype, device=device) if has_bias else None

    def slots(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        first = 0
        for name, size in self._parts:
            prefix = f"{name}." if name else ""
            rows_NK = self.weight_NK[first : first + size]
            slots[f"{prefix}weight"] = WeightSlot(tuple(rows_NK.shape), partial(_fill, rows_NK))
            if self.bias_N is not None:
                rows_N = self.bias_N[first : first + size]
                slots[f"{prefix}bias"] = WeightSlot((size,), partial(_fill, rows_N))
            first += size
        return slots


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
