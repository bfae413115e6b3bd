"""The product of rows with a weight in panels, computed by several threads.

Owns the division of the work (threads claim panels) and what becomes of a product: stored, added to
a residual stream, or gated. `panels.py` multiplies. Called by the worker's linear layers and, as
one part of a step, by `decoder_step.py`.

T tokens, K input features (a multiple of 32), N output features, P panels.
"""

import numpy as np
from numpy.typing import NDArray

from cearx.kernels.cpu_compiler import compiled
from cearx.kernels.panels import GROUP, PANEL_WIDTH, ROW_BYTES, TILE_BYTES, add_panel_product
from cearx.kernels.thread_steps import fetch_add

Floats = NDArray[np.float32]
Table = NDArray[np.int64]

STORE, ADD, GATE = 0, 1, 2
TILE_ROWS = 128
"""Rows multiplied while a panel is in the cache."""
SCRATCH_FLOATS = (TILE_BYTES + 2 * TILE_ROWS * ROW_BYTES) // 4
"""Of each thread."""


@compiled
def exp(x: np.float32) -> np.float32:
    """e ** x within one unit in the last place for x <= 88; below -87 as at -87 (1.6e-38)."""
    bounded = max(x, np.float32(-87.0))
    power = np.floor(bounded * np.float32(1.4426950408889634) + np.float32(0.5))
    rest = bounded - power * np.float32(0.693359375)
    rest = rest - power * np.float32(-2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    series = series * rest * rest + rest + np.float32(1.0)
    bits = (np.int32(power) + np.int32(127)) << np.int32(23)
    return np.float32(series * np.int32(bits).view(np.float32))


@compiled
def silu(x: np.float32) -> np.float32:
    return x / (np.float32(1.0) + exp(-max(x, np.float32(-87.0))))


@compiled
def _multiply(
    panel_4: Table, num_groups: int, x: int, stride: int, rows: int, tile: int, sums: Floats
) -> None:
    sums[: rows * PANEL_WIDTH] = np.float32(0.0)
    address = sums.ctypes.data
    add_panel_product(panel_4[0], panel_4[1], num_groups, x, stride, rows, tile, address)


@compiled
def panel_product(
    panels_P4: Table,
    x_TK: Floats,
    bias_N: Floats,
    out_TN: Floats,
    then: int,
    claims: int,
    scratch: Floats,
) -> None:
    """Computes the panels that this thread claims; run it in every thread of a team.

    `panels_P4` rows are (address, kind, first feature, features); `claims` is the address of a
    counter; `then` is STORE, ADD (out += product) or GATE: out = silu(product of the first half of
    the features) * (product of the second half).
    """
    num_tokens = x_TK.shape[0]
    num_groups = x_TK.shape[1] // GROUP
    num_claims = panels_P4.shape[0] // 2 if then == GATE else panels_P4.shape[0]
    stride = 4 * x_TK.shape[1]
    tile = scratch.ctypes.data
    sums = scratch[TILE_BYTES // 4 :]
    second_sums = sums[TILE_ROWS * PANEL_WIDTH :]
    while True:
        claim = fetch_add(claims, 1)
        if claim >= num_claims:
            break
        first, width = panels_P4[claim, 2], panels_P4[claim, 3]
        up_first = panels_P4[num_claims + claim, 2] if then == GATE else 0
        for start in range(0, num_tokens, TILE_ROWS):
            rows = min(TILE_ROWS, num_tokens - start)
            x = x_TK.ctypes.data + start * stride
            _multiply(panels_P4[claim], num_groups, x, stride, rows, tile, sums)
            if then == GATE:
                up = panels_P4[num_claims + claim]
                _multiply(up, num_groups, x, stride, rows, tile, second_sums)
            for row in range(rows):
                out_N = out_TN[start + row]
                at = row * PANEL_WIDTH
                if then == STORE:
                    for i in range(width):
                        out_N[first + i] = sums[at + i] + bias_N[first + i]
                elif then == ADD:
                    for i in range(width):
                        out_N[first + i] += sums[at + i] + bias_N[first + i]
                else:
                    for i in range(width):
                        gate = silu(sums[at + i] + bias_N[first + i])
                        out_N[first + i] = gate * (second_sums[at + i] + bias_N[up_first + i])
