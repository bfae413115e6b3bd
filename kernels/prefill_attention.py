"""Causal attention of chunks of query tokens over paged keys and values.

    out_tn = sum_l softmax_l(scale * q_tn . k_l) v_l      l in [0, position of t]

A chunk may start anywhere in its request: its keys and those before it lie in the pool already.
A program takes one key-value head and BLOCK_M rows, where a row is a pair (token, query head of the
group): all heads of a group share every tile of keys and values, and short chunks fill their rows.
It first walks the tiles that all its rows see, without masks, then those at the diagonal, where
positions past the chunk are clamped to its last key and masked, so that unwritten slots are never
read. Long rows start first. The grid depends on host values alone (`max_q_len`, chunks, heads):
programs past a chunk's end exit at once, so padded chunks of no tokens are fine in a CUDA graph.

Called once a layer for the chunks of a step; allocates nothing, never synchronises.

T tokens, C chunks, S seats, N query heads, K key-value heads, G = N / K, D head_dim, B blocks,
P block size, M blocks of a request.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cearx.kernels.paged_kv import as_computed, check_pool, check_tables, check_types, gather_float


@dataclass(frozen=True)
class PrefillConfig:
    """How the kernel is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


FEW_TOKENS = 512
"""Up to here (tokens of the longest chunk) masks and empty rows cost more than loads."""

CONFIGS: dict[tuple[bool, int], PrefillConfig] = {
    # (tokens of the longest chunk <= FEW_TOKENS, bytes of a key)
    (True, 128): PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
    (False, 128): PrefillConfig(block_m=128, block_n=64, num_warps=4, num_stages=3),
    (True, 256): PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=3),
    (False, 256): PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
    (True, 512): PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=2),
    (False, 512): PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=2),
}


@triton.jit
def _walk(
    b_q,
    b_max,
    b_sum,
    b_acc,
    p_k,
    p_table,
    start,
    end,
    last,
    b_position,
    score_scale,
    VALUES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Folds the keys of [start, end) into the running maximum, sum and output of every row."""
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, HEAD_DIM)
    # The block of a tile is loaded while the tile before it is computed.
    block = tl.load(p_table + tl.minimum(start, last) // BLOCK_SIZE)
    for first in tl.range(start, end, BLOCK_N):
        position = first + o_n
        if MASKED:
            position = tl.minimum(position, last)
        if BLOCK_SIZE >= BLOCK_N:
            offset = position - first // BLOCK_SIZE * BLOCK_SIZE
            o_token = block.to(tl.int64) * (2 * VALUES) + offset * HEAD_DIM
            block = tl.load(p_table + tl.minimum(first + BLOCK_N, last) // BLOCK_SIZE)
        else:
            blocks = tl.load(p_table + position // BLOCK_SIZE)
            o_token = blocks.to(tl.int64) * (2 * VALUES) + position % BLOCK_SIZE * HEAD_DIM
        p_tile = p_k + o_token[:, None] + o_d[None, :]
        b_k = as_computed(tl.load(p_tile), b_q.dtype)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if MASKED:
            seen = (first + o_n)[None, :] <= b_position[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(b_max, tl.max(scores, 1) * score_scale)
        b_p = tl.exp2(scores * score_scale - new_max[:, None])
        rescale = tl.exp2(b_max - new_max)
        b_sum = b_sum * rescale + tl.sum(b_p, 1)
        b_acc = b_acc * rescale[:, None]
        b_v = as_computed(tl.load(p_tile + VALUES), b_q.dtype)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
        b_max = new_max
    return b_max, b_sum, b_acc


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    p_q,
    p_kv,
    p_tables,
    p_seats,
    p_cu_seqlens,
    p_lens,
    p_out,
    q_stride,
    out_stride,
    table_stride,
    score_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    HEAD_STRIDE: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    VALUES: tl.constexpr = NUM_KV_HEADS * HEAD_STRIDE
    i_head = tl.program_id(1)
    i_chunk = tl.program_id(2)
    first_token = tl.load(p_cu_seqlens + i_chunk)
    num_tokens = tl.load(p_cu_seqlens + i_chunk + 1) - first_token
    # The last rows see the most keys: they start first, so that none is left alone at the end.
    i_tile = tl.cdiv(num_tokens * GROUP, BLOCK_M) - 1 - tl.program_id(0)
    length = tl.load(p_lens + i_chunk)
    seat = tl.load(p_seats + i_chunk)
    if i_tile < 0:
        return
    prefix = length - num_tokens

    row = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < num_tokens * GROUP
    # Rows past the chunk compute its last token again and are not stored.
    token = tl.minimum(row // GROUP, num_tokens - 1)
    b_position = prefix + token
    i_q = i_head * GROUP + row % GROUP
    o_d = tl.arange(0, HEAD_DIM)
    o_row = (first_token + token).to(tl.int64)
    b_q = tl.load(p_q + (o_row * q_stride + i_q * HEAD_DIM)[:, None] + o_d[None, :])

    p_k = p_kv + i_head * HEAD_STRIDE
    p_table = p_tables + seat.to(tl.int64) * table_stride
    first_position = prefix + i_tile * BLOCK_M // GROUP
    last = prefix + tl.minimum((i_tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_tokens - 1)
    seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    b_max, b_sum, b_acc = _walk(
        b_q,
        b_max,
        b_sum,
        b_acc,
        p_k,
        p_table,
        0,
        seen_by_all,
        last,
        b_position,
        score_scale,
        VALUES,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        False,
    )
    b_max, b_sum, b_acc = _walk(
        b_q,
        b_max,
        b_sum,
        b_acc,
        p_k,
        p_table,
        seen_by_all,
        last + 1,
        last,
        b_position,
        score_scale,
        VALUES,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        True,
    )
    b_out = b_acc / b_sum[:, None]
    tl.store(
        p_out + (o_row * out_stride + i_q * HEAD_DIM)[:, None] + o_d[None, :],
        b_out.to(p_out.dtype.element_ty),
        mask=exists[:, None] & (o_d >= 0)[None, :],
    )


def choose_config(max_q_len: int, key_bytes: int) -> PrefillConfig:
    """The checked-in choice; `key_bytes` is one key's size, D times the type's."""
    key_bytes = min(max(key_bytes, 128), 512)
    return CONFIGS[(max_q_len <= FEW_TOKENS, key_bytes)]


def prefill_attention(
    q_TND: Tensor,
    kv_B2KPD: Tensor,
    block_tables_SM: Tensor,
    seats_C: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_C: Tensor,
    out_TND: Tensor,
    max_q_len: int,
    scale: float,
    *,
    config: PrefillConfig | None = None,
) -> None:
    """Writes the attention of every chunk's tokens to `out_TND`; other rows stay as they are.

    Chunk c owns tokens [cu_seqlens_q[c], cu_seqlens_q[c + 1]), at most `max_q_len` (longer ones
    would be cut), and the last of them is token seq_lens_C[c] - 1 of its request. cu_seqlens_q
    [C + 1], seats, lengths and tables are int32. q and out may be strided views whose heads are
    contiguous; q and out share a type. `config` is for tuning only.
    """
    num_kv_heads, block_size, head_dim = check_pool(kv_B2KPD)
    num_q_heads = q_TND.shape[1]
    check_tables(block_tables_SM, seats_C, seq_lens_C)
    num_chunks = seats_C.shape[0]
    assert cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.shape == (num_chunks + 1,)
    assert q_TND.shape == out_TND.shape and q_TND.shape[2] == head_dim
    check_types(kv_B2KPD, q_TND, out_TND)
    assert q_TND.stride()[1:] == out_TND.stride()[1:] == (head_dim, 1), "heads must be contiguous"
    group = num_q_heads // num_kv_heads
    assert num_q_heads == group * num_kv_heads, (num_q_heads, num_kv_heads)
    if num_chunks == 0 or max_q_len == 0:
        return
    config = config or choose_config(max_q_len, head_dim * q_TND.element_size())
    num_tiles = triton.cdiv(max_q_len * group, config.block_m)
    _prefill_kernel[(num_tiles, num_kv_heads, num_chunks)](
        q_TND,
        kv_B2KPD,
        block_tables_SM,
        seats_C,
        cu_seqlens_q,
        seq_lens_C,
        out_TND,
        q_TND.stride(0),
        out_TND.stride(0),
        block_tables_SM.stride(0),
        scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def reference_prefill_attention(
    q_TND: Tensor,
    kv_B2KPD: Tensor,
    block_tables_SM: Tensor,
    seats_C: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_C: Tensor,
    scale: float,
) -> Tensor:
    """The same in float32 and plain torch, [T, N, D]; rows of no chunk are zero."""
    out_TND = torch.zeros(q_TND.shape, dtype=torch.float32, device=q_TND.device)
    starts: list[int] = cu_seqlens_q.tolist()
    for chunk, (seat, length) in enumerate(zip(seats_C.tolist(), seq_lens_C.tolist(), strict=True)):
        tokens = slice(starts[chunk], starts[chunk + 1])
        num_tokens = starts[chunk + 1] - starts[chunk]
        if num_tokens == 0:
            continue
        k_LKD, v_LKD = gather_float(kv_B2KPD, block_tables_SM[seat], length)
        q_TKGD = q_TND[tokens].float().unflatten(1, (k_LKD.shape[1], -1))
        scores_KGTL = torch.einsum("tkgd,lkd->kgtl", q_TKGD, k_LKD) * scale
        later_TL = torch.ones(num_tokens, length, dtype=torch.bool, device=q_TND.device)
        later_TL = later_TL.triu(length - num_tokens + 1)
        weights_KGTL = scores_KGTL.masked_fill(later_TL, -torch.inf).softmax(-1)
        out_TND[tokens] = torch.einsum("kgtl,lkd->tkgd", weights_KGTL, v_LKD).flatten(1, 2)
    return out_TND
