"""Rows of a weight into panels, and single rows out of them as an embedding looks them up.

Owns the scalar writing and reading of the bytes that `panels.py` lays out. Called by the worker's
panel weight; a look-up is some microseconds a token, so one thread does it.

T tokens, K input features, N output features, P panels, G groups, B bytes or F floats of a group.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from cearx.kernels.cpu_compiler import compiled, emitted
from cearx.kernels.panels import BYTES, GROUP, GROUP_BYTES, NIBBLES, PANEL_WIDTH, ROW_BYTES


@emitted(types.float32, types.int64)
def float_at(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.load(b.inttoptr(address, ir.FloatType().as_pointer()))


@emitted(types.int8, types.int64)
def byte_at(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """As an int8; the high bits of an unsigned one are what the caller masks."""
    return b.load(b.inttoptr(address, ir.IntType(8).as_pointer()))


@compiled
def pack_rows(
    codes_NK: NDArray[np.uint8],
    scales_NG: NDArray[np.float32],
    offsets_NG: NDArray[np.float32],
    kind: int,
    out_PGB: NDArray[np.uint8],
    out_PGF: NDArray[np.float32],
) -> None:
    """Fills panels of zeros, given as bytes and as floats; BYTES have no offsets to look at."""
    header = 2 * ROW_BYTES if kind == NIBBLES else ROW_BYTES
    for row in range(codes_NK.shape[0]):
        panel, lane = row // PANEL_WIDTH, row % PANEL_WIDTH
        for group in range(scales_NG.shape[1]):
            out_PGF[panel, group, lane] = scales_NG[row, group]
            if kind == NIBBLES:
                out_PGF[panel, group, PANEL_WIDTH + lane] = offsets_NG[row, group]
            for k in range(GROUP):
                code = codes_NK[row, group * GROUP + k]
                if kind == NIBBLES:
                    place = header + k // 2 * PANEL_WIDTH + lane
                    out_PGB[panel, group, place] |= code << (4 * (k % 2))
                else:
                    out_PGB[panel, group, header + k * PANEL_WIDTH + lane] = code


@compiled
def read_rows(
    panels_P4: NDArray[np.int64],
    panel_T: NDArray[np.int64],
    lane_T: NDArray[np.int64],
    out_TK: NDArray[np.float32],
) -> None:
    """Row t of `out_TK` becomes feature `lane_T[t]` of panel `panel_T[t]`."""
    for token in range(out_TK.shape[0]):
        panel, kind = panels_P4[panel_T[token], 0], panels_P4[panel_T[token], 1]
        lane = lane_T[token]
        for k in range(out_TK.shape[1]):
            group = panel + k // GROUP * GROUP_BYTES[kind]
            k_in_group = k % GROUP
            if kind == NIBBLES:
                place = group + 2 * ROW_BYTES + k_in_group // 2 * PANEL_WIDTH + lane
                code = (np.int32(byte_at(place)) >> (4 * (k_in_group % 2))) & 15
                offset = float_at(group + ROW_BYTES + 4 * lane)
                out_TK[token, k] = float_at(group + 4 * lane) * np.float32(code) + offset
            elif kind == BYTES:
                code = np.int32(byte_at(group + ROW_BYTES + k_in_group * PANEL_WIDTH + lane))
                out_TK[token, k] = float_at(group + 4 * lane) * np.float32(code)
            else:
                out_TK[token, k] = float_at(group + k_in_group * ROW_BYTES + 4 * lane)
