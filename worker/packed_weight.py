"""A weight matrix stored for fast products with few rows on CPUs.

Owns the layout and the products over it; knows nothing of ranks or checkpoints. A plain product
with 1 to 64 rows leaves most of a CPU idle; over column blocks that fit the caches, computed as one
batched product, it runs at memory speed for one row and several times faster for a batch.

T tokens, K input features, N output features = B blocks * W columns.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu

MAX_BLOCK_WIDTH = 512
MIN_BLOCK_WIDTH = 64
"""Between these a block's columns keep the vector units busy and its rows fit a core's cache."""
MANY_BLOCKS = 16
"""Blocks a thread from which one more or less no longer matters."""
TILE_ROWS = 256
"""Rows computed at once: a tile of inputs stays in the cache while all blocks pass over it."""


class PackedWeight:
    """`x @ weight.T (+ bias)` with the weight as [B, K, W]: block b holds columns b*W .. b*W+W-1.

    `halves` keeps blocks from lying across the middle, for a merged pair of equal parts.
    """

    def __init__(
        self, out_features: int, in_features: int, dtype: torch.dtype, *, halves: bool = False
    ) -> None:
        self.width = _block_width(out_features, out_features // 2 if halves else out_features)
        num_blocks = out_features // self.width
        self.blocks_BKW = torch.empty(num_blocks, in_features, self.width, dtype=dtype)
        self.bias_B1W: Tensor | None = None

    def store_rows(self, first_row: int, rows_NK: Tensor) -> None:
        """Writes rows [first_row, first_row + N) of the weight as checkpoints hold it, [N, K]."""
        end_row = first_row + rows_NK.shape[0]
        for block in range(first_row // self.width, -(-end_row // self.width)):
            start = block * self.width
            low, high = max(start, first_row), min(start + self.width, end_row)
            columns_KN = rows_NK[low - first_row : high - first_row].t()
            self.blocks_BKW[block, :, low - start : high - start].copy_(columns_KN)

    def store_bias(self, first_row: int, bias_N: Tensor) -> None:
        if self.bias_B1W is None:
            num_blocks, _, width = self.blocks_BKW.shape
            self.bias_B1W = self.blocks_BKW.new_zeros(num_blocks, 1, width)
        self.bias_B1W.view(-1)[first_row : first_row + bias_N.shape[0]].copy_(bias_N)

    def columns(self, index_T: Tensor) -> Tensor:
        """Rows `index_T` of the weight as checkpoints hold it, [T, K]: an embedding look-up."""
        return self.blocks_BKW[index_T // self.width, :, index_T % self.width].contiguous()

    def product_BTW(self, x_TK: Tensor) -> Tensor:
        """The product in blocks, for callers that go on elementwise; at most TILE_ROWS rows."""
        x_BTK = x_TK.expand(self.blocks_BKW.shape[0], -1, -1)
        if self.bias_B1W is None:
            return torch.bmm(x_BTK, self.blocks_BKW)
        return torch.baddbmm(self.bias_B1W, x_BTK, self.blocks_BKW)

    def product(self, x_TK: Tensor) -> Tensor:
        """[T, N], contiguous."""
        num_rows = x_TK.shape[0]  # none in a step that computes parts of prompts only
        num_columns = self.blocks_BKW.shape[0] * self.width
        if num_rows == 1:  # one row of every block lies as the output does
            return self.product_BTW(x_TK).view(1, num_columns)
        if num_rows <= TILE_ROWS:
            return self.product_BTW(x_TK).transpose(0, 1).reshape(num_rows, num_columns)
        out_TN = x_TK.new_empty(num_rows, num_columns)
        for tile in tiles(num_rows):
            self.as_blocks(out_TN[tile]).copy_(self.product_BTW(x_TK[tile]))
        return out_TN

    def add_product(self, x_TK: Tensor, out_TN: Tensor) -> None:
        """`out += product(x)` in place; `out_TN` is contiguous."""
        # The sum is not started from `out_TN`: beside a large residual each term would be rounded.
        if x_TK.shape[0] == 1:
            out_TN.add_(self.product_BTW(x_TK).view(1, -1))
            return
        for tile in tiles(x_TK.shape[0]):
            self.as_blocks(out_TN[tile]).add_(self.product_BTW(x_TK[tile]))

    def gated_product(self, x_TK: Tensor) -> Tensor:
        """`silu(first half of product(x)) * second half`, block by block; made with `halves`."""
        num_rows = x_TK.shape[0]
        if num_rows == 1:
            gate_B1W, up_B1W = self.product_BTW(x_TK).chunk(2)
            return silu(gate_B1W, inplace=True).mul_(up_B1W).view(1, -1)
        num_blocks = self.blocks_BKW.shape[0]
        out_TN = x_TK.new_empty(num_rows, num_blocks // 2 * self.width)
        for tile in tiles(num_rows):
            gate_BTW, up_BTW = self.product_BTW(x_TK[tile]).chunk(2)
            torch.mul(silu(gate_BTW, inplace=True), up_BTW, out=self.as_blocks(out_TN[tile]))
        return out_TN

    def as_blocks(self, out_TN: Tensor) -> Tensor:
        """A view [B, T, W] of a contiguous [T, N]."""
        return out_TN.view(out_TN.shape[0], -1, self.width).transpose(0, 1)


def tiles(num_rows: int) -> Iterator[slice]:
    """The rows in tiles of TILE_ROWS."""
    return (slice(first, first + TILE_ROWS) for first in range(0, num_rows, TILE_ROWS))


def _block_width(out_features: int, unit: int) -> int:
    """The widest block that divides `unit` and gives every thread the same number of blocks.

    With many blocks a thread may have one more than another; where nothing divides, `unit` is one
    block.
    """
    widths = [
        width
        for width in range(MAX_BLOCK_WIDTH, MIN_BLOCK_WIDTH - 1, -16)
        if unit % width == 0 and out_features // width > 1
    ]
    num_threads = torch.get_num_threads()
    for width in widths:
        num_blocks = out_features // width
        if num_blocks % num_threads == 0 or num_blocks >= MANY_BLOCKS * num_threads:
            return width
    return widths[0] if widths else unit
