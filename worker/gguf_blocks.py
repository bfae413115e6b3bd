"""The quantised blocks of GGUF files taken apart into codes, scales and offsets.

Owns the byte layouts of the kinds that stay quantised in memory (the GGUF package defines them and
decodes all others to floats). Called by the GGUF loader.

N output features, K input features, Q = N * K / 32 blocks.
"""

from collections.abc import Callable, Mapping

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from cearx.worker.block_quantised import BLOCK_SIZE, BlockQuantised

Bytes = NDArray[np.uint8]
NIBBLE_BYTES = BLOCK_SIZE // 2


def _q8_0(blocks_Q: Bytes, shape: tuple[int, ...]) -> BlockQuantised:
    """float16 scale, 32 int8."""
    codes = np.ascontiguousarray(blocks_Q[:, 2:]).view(np.int8).reshape(shape)
    return BlockQuantised(codes, _halfs(blocks_Q, 0, shape), None)


def _q4_1(blocks_Q: Bytes, shape: tuple[int, ...]) -> BlockQuantised:
    """float16 scale, float16 offset, 16 bytes: the low bits hold codes 0..15, the high 16..31."""
    return BlockQuantised(
        _nibbles(blocks_Q[:, 4:], shape), _halfs(blocks_Q, 0, shape), _halfs(blocks_Q, 2, shape)
    )


def _q4_0(blocks_Q: Bytes, shape: tuple[int, ...]) -> BlockQuantised:
    """As Q4_1 without an offset: 8 is taken from each code."""
    scales_NG = _halfs(blocks_Q, 0, shape)
    return BlockQuantised(_nibbles(blocks_Q[:, 2:], shape), scales_NG, np.float32(-8.0) * scales_NG)


def _halfs(blocks_Q: Bytes, start: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    halfs = np.ascontiguousarray(blocks_Q[:, start : start + 2]).view("<f2")
    return halfs.astype(np.float32).reshape(shape[0], -1)


def _nibbles(packed_Q: Bytes, shape: tuple[int, ...]) -> Bytes:
    codes = np.empty((len(packed_Q), BLOCK_SIZE), np.uint8)
    np.bitwise_and(packed_Q, 15, out=codes[:, :NIBBLE_BYTES])
    np.right_shift(packed_Q, 4, out=codes[:, NIBBLE_BYTES:])
    return codes.reshape(shape)


DECODERS: Mapping[GGMLQuantizationType, Callable[[Bytes, tuple[int, ...]], BlockQuantised]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}
