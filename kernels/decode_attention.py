"""Attention of one query token a row over its paged keys and values, split along the context.

    out_n = sum_l softmax_l(scale * q_n . k_l) v_l        l in [0, seq_len), head n's K head n // G

The G query heads that share a key-value head are the rows of one small matrix product, padded to
16; the softmax runs online in base 2 and float32. A tile of BLOCK_N keys lies in one block of the
pool where the block is large enough. Rows past a length are clamped to the last key and their
scores masked, so that no load needs a mask and no unwritten slot is ever read.

Splits: the grid (K, R, max_splits) depends on the number of rows alone, so that a CUDA graph can
freeze it; every program reads its row's length and derives how many splits the row really has.
Programs beyond that exit at once; `row_splits` writes or adds up what the others found.

Called once a layer for decode rows beside prompts; allocates nothing, never synchronises.

R rows, S seats, N query heads, K key-value heads, G = N / K, D head_dim, B blocks, P block size,
M blocks of a row.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cearx.kernels.paged_kv import as_computed, check_pool, check_tables, check_types, gather_float
from cearx.kernels.row_splits import (
    MAX_GROUP,
    MAX_PROGRAMS,
    DecodeScratch,
    count_splits,
    softmax_step,
    sum_chunk,
    write_group,
)


@dataclass(frozen=True)
class DecodeConfig:
    """How the kernel is compiled and when rows are split."""

    block_n: int
    num_warps: int
    num_stages: int
    min_split: int
    """Tokens: a row of n of them has at most n / min_split splits."""
    max_programs: int = MAX_PROGRAMS


CONFIGS: dict[int, tuple[tuple[int, DecodeConfig], ...]] = {
    # bytes of a key: (up to so many rows * K, configuration), the last for all beyond
    128: (
        (128, DecodeConfig(block_n=128, num_warps=4, num_stages=3, min_split=256)),
        (0, DecodeConfig(block_n=64, num_warps=4, num_stages=3, min_split=512)),
    ),
    256: (
        (16, DecodeConfig(block_n=64, num_warps=2, num_stages=3, min_split=160)),
        (128, DecodeConfig(block_n=64, num_warps=2, num_stages=3, min_split=256)),
        (0, DecodeConfig(block_n=64, num_warps=2, num_stages=2, min_split=512)),
    ),
    512: ((0, DecodeConfig(block_n=32, num_warps=4, num_stages=2, min_split=256)),),
}
"""Those of 256 bytes balance a sweep over contexts of 64 to 8192 (docs/experiments.md)."""


@triton.jit(do_not_specialize=["table_stride", "min_split"])
def _decode_kernel(
    p_q,
    p_kv,
    p_tables,
    p_seats,
    p_lens,
    p_out,
    p_partials,
    p_maxima,
    p_sums,
    p_arrived,
    q_stride,
    out_stride,
    table_stride,
    min_split,
    score_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    ROWS: tl.constexpr = 16
    HEAD_STRIDE: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    VALUES: tl.constexpr = NUM_KV_HEADS * HEAD_STRIDE
    i_head = tl.program_id(0)
    i_row = tl.program_id(1)
    i_split = tl.program_id(2)
    max_splits = tl.num_programs(2)
    length = tl.load(p_lens + i_row)
    seat = tl.load(p_seats + i_row)
    # Equal splits of whole tiles: after rounding there may be fewer than asked for.
    num_splits = tl.maximum(tl.minimum(length // min_split, max_splits), 1)
    split_len = tl.maximum(tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N), 1) * BLOCK_N
    num_splits = tl.maximum(tl.cdiv(length, split_len), 1)
    if i_split >= num_splits:
        return
    start = i_split * split_len
    end = tl.minimum(start + split_len, length)
    last = tl.maximum(length - 1, 0)

    p_k = p_kv + i_head * HEAD_STRIDE
    p_table = p_tables + seat.to(tl.int64) * table_stride
    # The block of a tile is loaded while the tile before it is computed.
    block = tl.load(p_table + tl.minimum(start, last) // BLOCK_SIZE)

    o_g = tl.arange(0, ROWS)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, HEAD_DIM)
    in_group = (o_g < GROUP)[:, None] & (o_d >= 0)[None, :]
    i_q = i_head * GROUP + o_g
    b_q = tl.load(
        p_q + i_row.to(tl.int64) * q_stride + i_q[:, None] * HEAD_DIM + o_d[None, :],
        mask=in_group,
        other=0.0,
    )
    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for first in tl.range(start, end, BLOCK_N):
        position = tl.minimum(first + o_n, last)
        if BLOCK_SIZE >= BLOCK_N:
            offset = position - first // BLOCK_SIZE * BLOCK_SIZE
            o_token = block.to(tl.int64) * (2 * VALUES) + offset * HEAD_DIM
            block = tl.load(p_table + tl.minimum(first + BLOCK_N, last) // BLOCK_SIZE)
        else:
            blocks = tl.load(p_table + position // BLOCK_SIZE)
            o_token = blocks.to(tl.int64) * (2 * VALUES) + position % BLOCK_SIZE * HEAD_DIM
        p_tile = p_k + o_token[:, None] + o_d[None, :]
        b_k = as_computed(tl.load(p_tile), b_q.dtype)
        b_v = as_computed(tl.load(p_tile + VALUES), b_q.dtype)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * score_scale
        scores = tl.where((first + o_n < length)[None, :], scores, float("-inf"))
        b_max, b_sum, b_acc = softmax_step(scores, b_v, b_max, b_sum, b_acc)

    write_group(
        p_out + i_row.to(tl.int64) * out_stride + i_head * GROUP * HEAD_DIM,
        b_max,
        b_sum,
        b_acc,
        p_partials,
        p_maxima,
        p_sums,
        p_arrived,
        i_row * NUM_KV_HEADS + i_head,
        i_split,
        num_splits,
        max_splits,
        ROWS,
        GROUP,
        GROUP_PADDED,
        HEAD_DIM,
        CHUNK,
    )


def choose_config(num_rows: int, num_kv_heads: int, key_bytes: int) -> DecodeConfig:
    """The checked-in choice for a launch; `key_bytes` is one key's size, D times the type's."""
    choices = CONFIGS[min(max(key_bytes, 128), 512)]
    fitting = (config for limit, config in choices if num_rows * num_kv_heads <= limit)
    return next(fitting, choices[-1][1])


def decode_attention(
    q_RND: Tensor,
    kv_B2KPD: Tensor,
    block_tables_SM: Tensor,
    seats_R: Tensor,
    seq_lens_R: Tensor,
    out_RND: Tensor,
    scratch: DecodeScratch,
    scale: float,
    *,
    config: DecodeConfig | None = None,
) -> None:
    """Writes every row's attention over its first `seq_lens_R` tokens to `out_RND`.

    q and out may be strided views whose heads are contiguous; q and out share a type. Seats,
    lengths and tables are int32; a row of length 0 gives zeros. `config` is for tuning only.
    """
    num_kv_heads, block_size, head_dim = check_pool(kv_B2KPD)
    num_rows, num_q_heads, _ = q_RND.shape
    check_tables(block_tables_SM, seats_R, seq_lens_R)
    assert q_RND.shape == out_RND.shape == (seats_R.shape[0], num_q_heads, head_dim)
    check_types(kv_B2KPD, q_RND, out_RND)
    assert q_RND.stride()[1:] == out_RND.stride()[1:] == (head_dim, 1), "heads must be contiguous"
    group = num_q_heads // num_kv_heads
    assert num_q_heads == group * num_kv_heads and group <= MAX_GROUP, (num_q_heads, num_kv_heads)
    if num_rows == 0:
        return
    config = config or choose_config(num_rows, num_kv_heads, head_dim * q_RND.element_size())
    max_splits = count_splits(num_rows, num_kv_heads, config.max_programs)
    scratch.check(num_rows, num_q_heads, num_kv_heads, max_splits)
    group_padded = triton.next_power_of_2(group)
    _decode_kernel[(num_kv_heads, num_rows, max_splits)](
        q_RND,
        kv_B2KPD,
        block_tables_SM,
        seats_R,
        seq_lens_R,
        out_RND,
        scratch.partials,
        scratch.maxima,
        scratch.sums,
        scratch.arrived,
        q_RND.stride(0),
        out_RND.stride(0),
        block_tables_SM.stride(0),
        config.min_split,
        scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=group_padded,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n,
        CHUNK=sum_chunk(config.num_warps, group_padded),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def reference_decode_attention(
    q_RND: Tensor,
    kv_B2KPD: Tensor,
    block_tables_SM: Tensor,
    seats_R: Tensor,
    seq_lens_R: Tensor,
    scale: float,
) -> Tensor:
    """The same in float32 and plain torch, [R, N, D]."""
    out_RND = torch.zeros(q_RND.shape, dtype=torch.float32, device=q_RND.device)
    for row, (seat, length) in enumerate(zip(seats_R.tolist(), seq_lens_R.tolist(), strict=True)):
        k_LKD, v_LKD = gather_float(kv_B2KPD, block_tables_SM[seat], length)
        q_KGD = q_RND[row].float().unflatten(0, (k_LKD.shape[1], -1))
        scores_KGL = torch.einsum("kgd,lkd->kgl", q_KGD, k_LKD) * scale
        out_KGD = torch.einsum("kgl,lkd->kgd", scores_KGL.softmax(-1), v_LKD)
        out_RND[row] = out_KGD.flatten(0, 1)
    return out_RND
