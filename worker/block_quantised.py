"""A matrix as quantised blocks hold it: small integers, and a scale and offset for each 32 of them.

Owns the form in which file readers hand such weights on, whatever the file's own bytes look like,
and its exact float32 values. `gguf_loader.py` makes them, `panel_weight.py` keeps them.

N output features, K input features, G = K / 32 blocks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 32


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
    def num_bytes(self) -> int:
        """Two codes below 16 share a byte."""
        if self.offsets_NG is None:
            return self.codes_NK.nbytes + self.scales_NG.nbytes
        return self.codes_NK.nbytes // 2 + self.scales_NG.nbytes + self.offsets_NG.nbytes

    def rows(self, index: slice | NDArray[np.int64]) -> "BlockQuantised":
        offsets_NG = None if self.offsets_NG is None else self.offsets_NG[index]
        return BlockQuantised(self.codes_NK[index], self.scales_NG[index], offsets_NG)
