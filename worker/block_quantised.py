"""A matrix as quantised blocks hold it: small integers, and a scale and offset for each 32 of them.

Owns the form in which such weights are handed on, whatever a file's own bytes look like, their
exact float32 values, and the rounding of floats to them. `gguf_loader.py` reads them from files,
`weights.py` asks for the rounding, `panel_weight.py` keeps them.

N output features, K input features, G blocks of 32 of them; the last may be shorter.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

BLOCK_SIZE = 32
MAX_CODE = 127


@dataclass(frozen=True, eq=False)
class BlockQuantised:
    """`scale * code + offset`, or `scale * code` where there are no offsets."""

    codes_NK: NDArray[np.uint8] | NDArray[np.int8]
    """uint8 below 16 with offsets, else int8."""
    scales_NG: NDArray[np.float32]
    offsets_NG: NDArray[np.float32] | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes_NK.shape

    @property
    def form(self) -> str:
        """What to call it in a log."""
        return "8-bit blocks" if self.offsets_NG is None else "4-bit blocks"

    @property
    def num_bytes(self) -> int:
        """Two codes below 16 share a byte."""
        if self.offsets_NG is None:
            return self.codes_NK.nbytes + self.scales_NG.nbytes
        return self.codes_NK.nbytes // 2 + self.scales_NG.nbytes + self.offsets_NG.nbytes

    def rows(self, index: slice | NDArray[np.int64]) -> "BlockQuantised":
        offsets_NG = None if self.offsets_NG is None else self.offsets_NG[index]
        return BlockQuantised(self.codes_NK[index], self.scales_NG[index], offsets_NG)


def round_to_int8(weight_NK: Tensor) -> BlockQuantised:
    """The nearest multiples of a block's largest magnitude / 127: at most half a step away.

    Raises ValueError for weights that are not finite.
    """
    num_rows, in_features = weight_NK.shape
    padding = -in_features % BLOCK_SIZE
    blocks_NGB = pad(weight_NK.float(), (0, padding)).view(num_rows, -1, BLOCK_SIZE)
    largest_NG1 = blocks_NGB.abs().amax(2, keepdim=True)
    if not bool(largest_NG1.isfinite().all()):
        raise ValueError("weights that are not finite cannot be rounded to int8")
    # A step below the normal floats would not be the 127th part: such a block is zero.
    scales_NG1 = largest_NG1 / MAX_CODE
    scales_NG1[scales_NG1 < torch.finfo(torch.float32).tiny] = 0.0
    steps_NGB = blocks_NGB / scales_NG1.masked_fill(scales_NG1 == 0.0, torch.inf)
    codes_NK = steps_NGB.round_().to(torch.int8).view(num_rows, -1)[:, :in_features]
    return BlockQuantised(codes_NK.contiguous().numpy(), scales_NG1.squeeze(2).numpy(), None)
