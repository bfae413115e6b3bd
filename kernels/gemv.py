# mypy: disable-error-code="assignment, var-annotated, has-type"
# Tuples of blocks grow while a kernel is compiled, which Python's types cannot say.
"""Products of one to eight tokens with a weight matrix: they read it once and do little else.

y = epilogue(norm(x) @ W^T), where the norm (optional) is RMSNorm, and the epilogue adds a bias,
adds to a residual in place, or takes SiLU(gate) * up of the two halves of W's rows. A program owns
BLOCK_N outputs and walks along K with a float32 accumulator an element, without tensor cores; the
norm is a factor of the whole row, so its sum of squares is taken on the way: rms(x) divides last.
8-bit weights become float32 as they are loaded, and their scale multiplies the finished sum.
Owns these kernels; `layer_linear` decides when they run. Legend: M tokens, N outputs, K inputs.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from cearx.kernels import dependent_launch
from cearx.kernels.dependent_launch import let_next_start, wait_for_previous
from cearx.kernels.fp8_weight import Weight, stored_parts
from cearx.kernels.scaled_rows import ScaledRows
from cearx.kernels.silu_mul import silu_times

MAX_TOKENS = 8

Epilogue = Literal["store", "add", "silu"]


@dataclass(frozen=True)
class GemvConfig:
    """How one product runs: outputs a program, inputs a step, warps, and the steps whose weights
    are requested before the kernel waits for its predecessor."""

    block_n: int
    block_k: int
    num_warps: int
    ahead: int


@triton.jit
def _gemv_kernel(
    p_x: tl.tensor,
    p_norm: tl.tensor,
    p_weight: tl.tensor,
    p_scale: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    p_next_weight: tl.tensor,
    p_next_scaled: tl.tensor,
    p_next_squares: tl.tensor,
    eps: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    # Gate and up are two matrices of N rows, one behind the other.
    PARTS: tl.constexpr = 2 if EPILOGUE == "silu" else 1
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)[None, :]
    if HAS_SCALE:
        # Eight at a time, as 16-bit inputs are loaded: both then lie alike in the registers.
        o_k = tl.max_contiguous(o_k, [1, 8])
    is_n = o_n < N
    o_tile = tl.arange(0, BLOCK_N)[:, None] * K + o_k
    p_tile = p_weight + tl.program_id(0).to(tl.int64) * (BLOCK_N * K) + o_tile

    tiles = ()
    for i in tl.static_range(AHEAD * PARTS):
        b_tile = _load_tile(p_tile, is_n, o_k, i % PARTS, i // PARTS, N, K, BLOCK_K)
        tiles = tiles + (b_tile,)  # noqa: RUF005  (the compiler knows no starred tuples)
    wait_for_previous(PDL)

    sums = ()
    squares = ()
    for _ in tl.static_range(M):
        squares = squares + (tl.zeros((1, BLOCK_K), tl.float32),)  # noqa: RUF005
        for _ in tl.static_range(PARTS):
            sums = sums + (tl.zeros((BLOCK_N, BLOCK_K), tl.float32),)  # noqa: RUF005
    for step in tl.static_range(STEPS):
        o_step = step * BLOCK_K
        is_k = o_k + o_step < K
        parts = ()
        for part in tl.static_range(PARTS):
            if step < AHEAD:
                b_part = tiles[step * PARTS + part]
            else:
                b_part = _load_tile(p_tile, is_n, o_k, part, step, N, K, BLOCK_K)
            parts = parts + (b_part.to(tl.float32),)  # noqa: RUF005
        if HAS_NORM:
            b_norm = tl.load(
                p_norm + o_step + o_k, mask=is_k, other=0.0, eviction_policy="evict_last"
            ).to(tl.float32)
        next_sums = ()
        next_squares = ()
        for m in tl.static_range(M):
            b_x = tl.load(
                p_x + m * K + o_step + o_k, mask=is_k, other=0.0, eviction_policy="evict_last"
            ).to(tl.float32)
            if HAS_NORM:
                next_squares = next_squares + (squares[m] + b_x * b_x,)  # noqa: RUF005
                b_x = b_x * b_norm
            for part in tl.static_range(PARTS):
                b_sum = sums[m * PARTS + part] + parts[part] * b_x
                next_sums = next_sums + (b_sum,)  # noqa: RUF005
        sums = next_sums
        if HAS_NORM:
            squares = next_squares

    let_next_start(PDL)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_n, mask=is_n, other=0.0).to(tl.float32)
    if HAS_NEXT:
        b_next = tl.load(p_next_weight + o_n, mask=is_n, other=0.0).to(tl.float32)
    if HAS_SCALE:
        b_scale = tl.load(p_scale + o_n, mask=is_n, other=0.0)
        if EPILOGUE == "silu":
            b_up_scale = tl.load(p_scale + N + o_n, mask=is_n, other=0.0)
    for m in tl.static_range(M):
        p_y = p_out + m * N + o_n
        b_y = tl.sum(sums[m * PARTS], axis=1)
        if HAS_SCALE:
            b_y = b_y * b_scale
        if HAS_NORM:
            inverse_rms = tl.rsqrt(tl.sum(squares[m], axis=1) / K + eps)
            b_y = b_y * inverse_rms
        if EPILOGUE == "silu":
            b_up = tl.sum(sums[m * PARTS + 1], axis=1)
            if HAS_SCALE:
                b_up = b_up * b_up_scale
            if HAS_NORM:
                b_up = b_up * inverse_rms
            b_y = silu_times(b_y, b_up)
        if HAS_BIAS:
            b_y = b_y + b_bias
        if EPILOGUE == "add":
            b_y = b_y + tl.load(p_y, mask=is_n, other=0.0).to(tl.float32)
        b_rounded = b_y.to(p_out.dtype.element_ty)
        tl.store(p_y, b_rounded, mask=is_n)
        if HAS_NEXT:
            b_row = tl.where(is_n, b_rounded.to(tl.float32), 0.0)
            b_scaled = (b_row * b_next).to(p_out.dtype.element_ty)
            tl.store(p_next_scaled + m * N + o_n, b_scaled, mask=is_n)
            tl.store(p_next_squares + tl.program_id(0) * M + m, tl.sum(b_row * b_row, axis=0))


@triton.jit
def _load_tile(
    p_tile: tl.tensor,
    is_n: tl.tensor,
    o_k: tl.tensor,
    PART: tl.constexpr,
    STEP: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The weights of one step, which are read once in a model's step."""
    p_step = p_tile + tl.full((), PART * N, tl.int64) * K + STEP * BLOCK_K
    if (STEP + 1) * BLOCK_K <= K:
        return tl.load(p_step, mask=is_n[:, None], other=0.0, eviction_policy="evict_first")
    else:
        mask = is_n[:, None] & (o_k + STEP * BLOCK_K < K)
        return tl.load(p_step, mask=mask, other=0.0, eviction_policy="evict_first")


def gemv(
    x_MK: torch.Tensor,
    weight: Weight,
    out_MN: torch.Tensor,
    config: GemvConfig,
    *,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    bias_N: torch.Tensor | None = None,
    epilogue: Epilogue = "store",
    next_weight_N: torch.Tensor | None = None,
    next_rows: ScaledRows | None = None,
) -> None:
    """Runs one product of 1..8 tokens; for "silu" `weight` holds gate's rows, then up's.

    All tensors are contiguous, the vectors may be of another float type than the rest. "add" reads
    and writes `out_MN`; `next_rows` are left for the norm of `next_weight_N` (`scaled_rows`).
    """
    num_tokens, num_inputs = x_MK.shape
    num_outputs = out_MN.shape[1]
    parts = 2 if epilogue == "silu" else 1
    weight_NK, scale_N = stored_parts(weight)
    assert num_tokens <= MAX_TOKENS, f"{num_tokens} tokens, at most {MAX_TOKENS}"
    assert weight_NK.shape == (parts * num_outputs, num_inputs) and len(out_MN) == num_tokens, (
        f"{tuple(x_MK.shape)} by {tuple(weight_NK.shape)} into {tuple(out_MN.shape)}"
    )
    assert epilogue != "silu" or bias_N is None, "no model has a bias under its gate"
    tensors = (x_MK, weight_NK, scale_N, out_MN, norm_weight_K, bias_N)
    assert all(t is None or t.is_contiguous() for t in tensors)
    steps = triton.cdiv(num_inputs, config.block_k)
    tiles = triton.cdiv(num_outputs, config.block_n)
    assert next_rows is None or (epilogue == "add" and len(next_rows.squares_PT) == tiles)
    _gemv_kernel[(tiles,)](
        x_MK,
        x_MK if norm_weight_K is None else norm_weight_K,
        weight_NK,
        x_MK if scale_N is None else scale_N,
        x_MK if bias_N is None else bias_N,
        out_MN,
        next_weight_N,
        None if next_rows is None else next_rows.scaled_TE,
        None if next_rows is None else next_rows.squares_PT,
        eps,
        M=num_tokens,
        N=num_outputs,
        K=num_inputs,
        EPILOGUE=epilogue,
        HAS_NORM=norm_weight_K is not None,
        HAS_SCALE=scale_N is not None,
        HAS_BIAS=bias_N is not None,
        HAS_NEXT=next_rows is not None,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        AHEAD=min(config.ahead, steps),
        PDL=dependent_launch.ENABLED,
        num_warps=config.num_warps,
        **dependent_launch.launch_options(),
    )
