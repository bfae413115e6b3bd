"""Query-key norm and rotary positions of heads that a kernel holds as two halves in its registers.

    x' = round(round(x / sqrt(mean(x^2) + eps)) * weight)          where the model has such norms
    y_i = round(round(x'_i * cos_i) -+ x'_(i +- D/2) * sin_i)      the half-split rotation

Rounds to the model's type exactly where the CPU model does (RMSNorm, then rotate_in_place). Owns
the arithmetic only; never loads or stores heads. Called by `position_and_store` and
`position_and_attend`, which therefore agree.

Shapes: halves [H, D/2]; norm weights [H, D/2] or [1, D/2]; cos and sin [1, D/2]; D head_dim.
"""

import triton
import triton.language as tl


@triton.jit
def load_cos_sin(p_cos_sin, position, dtype: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A position's (cos, sin) in float32, rounded to the model's type."""
    HALF: tl.constexpr = HEAD_DIM // 2
    p_cos = p_cos_sin + position * HEAD_DIM + tl.arange(0, HALF)
    cos = tl.load(p_cos).to(dtype).to(tl.float32)
    sin = tl.load(p_cos + HALF).to(dtype).to(tl.float32)
    return cos[None, :], sin[None, :]


@triton.jit
def load_norm_weights(p_q_norm, p_k_norm, is_query, HEAD_DIM: tl.constexpr):
    """(low, high) weights in float32 of heads that are queries or keys, [H, D/2] each."""
    HALF: tl.constexpr = HEAD_DIM // 2
    o_d = tl.arange(0, HALF)
    q_low = tl.load(p_q_norm + o_d).to(tl.float32)[None, :]
    q_high = tl.load(p_q_norm + HALF + o_d).to(tl.float32)[None, :]
    k_low = tl.load(p_k_norm + o_d).to(tl.float32)[None, :]
    k_high = tl.load(p_k_norm + HALF + o_d).to(tl.float32)[None, :]
    low = tl.where(is_query[:, None], q_low, k_low)
    high = tl.where(is_query[:, None], q_high, k_high)
    return low, high


@triton.jit
def norm_heads(low, high, weight_low, weight_high, eps, dtype: tl.constexpr):
    """float32 halves of `dtype`'s precision to normed ones."""
    mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * low.shape[1])
    factor = tl.rsqrt(mean + eps)[:, None]
    low = ((low * factor).to(dtype).to(tl.float32) * weight_low).to(dtype).to(tl.float32)
    high = ((high * factor).to(dtype).to(tl.float32) * weight_high).to(dtype).to(tl.float32)
    return low, high


@triton.jit
def rotate_heads(low, high, cos, sin, dtype: tl.constexpr):
    """float32 halves to rotated ones in `dtype`."""
    turned_low = ((low * cos).to(dtype).to(tl.float32) - high * sin).to(dtype)
    turned_high = ((high * cos).to(dtype).to(tl.float32) + low * sin).to(dtype)
    return turned_low, turned_high
