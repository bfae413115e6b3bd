"""Query-key norm, rotary positions and the write of keys and values, in one pass over qkv.

The arithmetic is that of `rotary_heads`: q is changed in place, k (rotated) and v go into their
slots of the pool. One program takes one token and a few heads; queries, keys and values may meet in
one program. A layer of a step with prompts calls it between its qkv product and its attention.

T tokens, X = (N + 2 K) * D, N query heads, K key-value heads, D head_dim, L positions,
B blocks, P block size, H heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cearx.kernels.paged_kv import FP8, as_stored, check_pool, check_types
from cearx.kernels.rotary_heads import (
    load_cos_sin,
    load_norm_weights,
    norm_heads,
    rotate_heads,
)

FEW_TOKENS = 1024
"""Up to here a program takes 8 heads so that more programs share a token, beyond it 16."""


@triton.jit
def _position_and_store_kernel(
    p_qkv,
    p_q_norm,
    p_k_norm,
    p_cos_sin,
    p_positions,
    p_slots,
    p_kv,
    qkv_stride,
    eps,
    HAS_NORM: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    FIRST_VALUE: tl.constexpr = NUM_Q_HEADS + NUM_KV_HEADS
    dtype = p_qkv.dtype.element_ty
    i_token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, HALF)
    is_query = o_h < NUM_Q_HEADS
    is_value = o_h >= FIRST_VALUE
    exists = (o_h < FIRST_VALUE + NUM_KV_HEADS)[:, None] & (o_d >= 0)[None, :]

    slot = tl.load(p_slots + i_token)
    position = tl.load(p_positions + i_token)
    cos, sin = load_cos_sin(p_cos_sin, position, dtype, HEAD_DIM)
    if HAS_NORM:
        weight_low, weight_high = load_norm_weights(p_q_norm, p_k_norm, is_query, HEAD_DIM)

    p_low = p_qkv + i_token * qkv_stride + o_h[:, None] * HEAD_DIM + o_d[None, :]
    raw_low = tl.load(p_low, mask=exists, other=0.0)
    raw_high = tl.load(p_low + HALF, mask=exists, other=0.0)
    low = raw_low.to(tl.float32)
    high = raw_high.to(tl.float32)
    if HAS_NORM:
        low, high = norm_heads(low, high, weight_low, weight_high, eps, dtype)
    turned_low, turned_high = rotate_heads(low, high, cos, sin, dtype)

    stays = exists & is_query[:, None]
    tl.store(p_low, turned_low, mask=stays)
    tl.store(p_low + HALF, turned_high, mask=stays)
    # Head h of the pool's block: keys are heads 0 .. K - 1, values K .. 2 K - 1.
    o_pool = (slot // BLOCK_SIZE) * (2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM)
    o_pool += (slot % BLOCK_SIZE) * HEAD_DIM
    o_pool_h = (o_h - NUM_Q_HEADS) * (BLOCK_SIZE * HEAD_DIM)
    p_pool = p_kv + o_pool + o_pool_h[:, None] + o_d[None, :]
    leaves = exists & (o_h >= NUM_Q_HEADS)[:, None]
    kv_low = tl.where(is_value[:, None], raw_low, turned_low)
    kv_high = tl.where(is_value[:, None], raw_high, turned_high)
    tl.store(p_pool, as_stored(kv_low, p_kv.dtype.element_ty), mask=leaves)
    tl.store(p_pool + HALF, as_stored(kv_high, p_kv.dtype.element_ty), mask=leaves)


def position_and_store(
    qkv_TX: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    cos_sin_LD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv_B2KPD: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
) -> None:
    """Rotates q in place and writes k and v to their slots.

    `cos_sin_LD` is float32, cos of the D/2 pairs, then sin; positions and slots are int64, a slot
    is block * P + offset. qkv and norms share the model's type.
    """
    pool_heads, block_size, head_dim = check_pool(kv_B2KPD)
    num_heads = num_q_heads + 2 * num_kv_heads
    num_tokens = qkv_TX.shape[0]
    assert pool_heads == num_kv_heads, f"{num_kv_heads} heads for a pool of {pool_heads}"
    assert qkv_TX.shape[1] == num_heads * head_dim and qkv_TX.stride(1) == 1, f"{qkv_TX.shape}"
    check_types(kv_B2KPD, qkv_TX)
    assert (q_norm_D is None) == (k_norm_D is None), "a norm of q or k alone"
    assert cos_sin_LD.dtype == torch.float32 and cos_sin_LD.is_contiguous()
    assert cos_sin_LD.shape[1] == head_dim, f"{cos_sin_LD.shape} for head_dim {head_dim}"
    assert positions_T.dtype == slots_T.dtype == torch.int64
    assert positions_T.shape == slots_T.shape == (num_tokens,)
    if num_tokens == 0:
        return
    block_h = 8 if num_tokens <= FEW_TOKENS else 16
    _position_and_store_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        qkv_TX,
        q_norm_D,
        k_norm_D,
        cos_sin_LD,
        positions_T,
        slots_T,
        kv_B2KPD,
        qkv_TX.stride(0),
        eps,
        HAS_NORM=q_norm_D is not None,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_H=block_h,
        num_warps=block_h // 4,
    )


def reference_position_and_store(
    qkv_TX: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    cos_sin_LD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv_B2KPD: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor]:
    """Returns (qkv_TX, kv_B2KPD) afterwards, float32 without any rounding but that to e4m3.

    Changes nothing.
    """
    _, block_size, head_dim = check_pool(kv_B2KPD)
    kv = kv_B2KPD.to(torch.float32, copy=True)
    x_THD = qkv_TX.float().unflatten(1, (-1, head_dim)).clone()
    q_THD, k_THD, v_THD = x_THD.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    cos_T1F, sin_T1F = cos_sin_LD[positions_T][:, None].chunk(2, dim=-1)
    turned = []
    for head_THD, weight_D in ((q_THD, q_norm_D), (k_THD, k_norm_D)):
        y_THD = head_THD
        if weight_D is not None:
            y_THD = y_THD * (y_THD.square().mean(-1, keepdim=True) + eps).rsqrt()
            y_THD = y_THD * weight_D.float()
        low, high = y_THD.chunk(2, dim=-1)
        turned.append(
            torch.cat((low * cos_T1F - high * sin_T1F, high * cos_T1F + low * sin_T1F), dim=-1)
        )
    blocks, offsets = slots_T // block_size, slots_T % block_size
    stored = [turned[1], v_THD]
    if kv_B2KPD.dtype == FP8:
        stored = [heads_THD.to(FP8).float() for heads_THD in stored]
    for index, heads_THD in enumerate(stored):
        kv[blocks, index, :, offsets] = heads_THD
    return torch.cat((turned[0], k_THD, v_THD), dim=1).flatten(1), kv
