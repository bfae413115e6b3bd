"""Products of up to 128 tokens with a weight matrix on tensor cores.

y^T = W @ x^T, so that the many outputs fill the tensor cores' rows and the few tokens are columns;
the epilogue adds a bias, adds to a residual in place, or takes SiLU(gate) * up of W's two halves.
A norm around it is split in two, as `scaled_rows` says: the rows come scaled by its weight, and the
product before has left the sums of squares.
With SPLIT_K > 1 several programs share K for a matrix of too few rows: each leaves its sums in
scratch memory, and the last to arrive adds them in a fixed order, so that results never vary.
8-bit weights become the inputs' type, exactly, before they are multiplied; their scale comes last.
Owns the kernel and that memory; `layer_linear` decides when it runs.
Legend: M tokens, N outputs, K inputs.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cearx.kernels import dependent_launch
from cearx.kernels.dependent_launch import let_next_start, wait_for_previous
from cearx.kernels.fp8_weight import Weight, stored_parts
from cearx.kernels.gemv import Epilogue
from cearx.kernels.scaled_rows import ScaledRows
from cearx.kernels.silu_mul import silu_times

MAX_TOKENS = 128
PARTIAL_SUMS = 1 << 23
"""float32 numbers of scratch memory for split products: 32 MiB."""
MAX_TILES = 1 << 14
"""Counters of arrived programs."""


@dataclass(frozen=True)
class SkinnyConfig:
    """How one product runs: outputs a program, inputs a step, warps, steps in flight, and programs
    that share K."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_kernel(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_scale: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    p_partial: tl.tensor,
    p_arrived: tl.tensor,
    p_squares: tl.tensor,
    p_next_weight: tl.tensor,
    p_next_scaled: tl.tensor,
    p_next_squares: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # Inputs of one program, in whole steps.
    SHARE: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
    o_n = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    is_n = o_n < N
    is_m = o_m < num_tokens
    # Rows beyond the matrix repeat its last, so that loads of weights need no mask along N.
    p_rows = p_weight + tl.minimum(o_n, N - 1).to(tl.int64)[:, None] * K
    first = i_split * SHARE
    wait_for_previous(PDL)

    if PARTS > 0 and SPLIT_K == 1:
        # Asked for now and added up behind the loop, which hides that they are far.
        b_squares = _load_squares(p_squares, o_m, is_m, num_tokens, PARTS, PARTS_PADDED)

    b_sum = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    b_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for o_step in tl.range(0, SHARE, BLOCK_K, num_stages=STAGES):
        o_k = first + o_step + tl.arange(0, BLOCK_K)
        is_k = o_k < K
        b_x = tl.load(
            p_x + o_m[None, :] * K + o_k[:, None], mask=is_k[:, None] & is_m[None, :], other=0.0
        )
        b_weight = tl.load(p_rows + o_k[None, :], mask=is_k[None, :], other=0.0)
        if HAS_SCALE:
            # By way of float32: straight to bfloat16 takes instructions of a quarter of the rate.
            b_weight = b_weight.to(tl.float32).to(b_x.dtype)
        b_sum = tl.dot(b_weight, b_x, b_sum, input_precision=PRECISION)
        if EPILOGUE == "silu":
            b_weight = tl.load(
                p_rows + tl.full((), N, tl.int64) * K + o_k[None, :], mask=is_k[None, :], other=0.0
            )
            if HAS_SCALE:
                b_weight = b_weight.to(tl.float32).to(b_x.dtype)
            b_up = tl.dot(b_weight, b_x, b_up, input_precision=PRECISION)

    let_next_start(PDL)
    if SPLIT_K > 1:
        o_partial = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + o_m[None, :]
        p_tile = p_partial + i_tile * (SPLIT_K * BLOCK_N * BLOCK_M) + o_partial
        tl.store(p_tile + i_split * (BLOCK_N * BLOCK_M), b_sum)
        # All threads' sums are written before one of them says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(p_arrived + i_tile, 1, sem="acq_rel", scope="gpu")
        if arrived < SPLIT_K - 1:
            return
        tl.store(p_arrived + i_tile, 0)
        b_sum = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for i in tl.static_range(SPLIT_K):
            b_sum += tl.load(p_tile + i * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
        if PARTS > 0:
            b_squares = _load_squares(p_squares, o_m, is_m, num_tokens, PARTS, PARTS_PADDED)

    if HAS_SCALE:
        b_sum *= tl.load(p_scale + o_n, mask=is_n, other=0.0)[:, None]
        if EPILOGUE == "silu":
            b_up *= tl.load(p_scale + N + o_n, mask=is_n, other=0.0)[:, None]
    if PARTS > 0:
        inverse_rms = tl.rsqrt(tl.sum(b_squares, axis=0) / K + eps)[None, :]
        b_sum *= inverse_rms
        b_up *= inverse_rms
    p_y = p_out + o_m[None, :] * N + o_n[:, None]
    is_y = is_n[:, None] & is_m[None, :]
    if EPILOGUE == "silu":
        b_sum = silu_times(b_sum, b_up)
    if HAS_BIAS:
        b_sum += tl.load(p_bias + o_n, mask=is_n, other=0.0).to(tl.float32)[:, None]
    if EPILOGUE == "add":
        b_sum += tl.load(p_y, mask=is_y, other=0.0).to(tl.float32)
    b_y = b_sum.to(p_out.dtype.element_ty)
    tl.store(p_y, b_y, mask=is_y)
    if HAS_NEXT:
        b_x = tl.where(is_y, b_y.to(tl.float32), 0.0)
        b_weight = tl.load(p_next_weight + o_n, mask=is_n, other=0.0).to(tl.float32)
        b_scaled = (b_x * b_weight[:, None]).to(p_out.dtype.element_ty)
        tl.store(p_next_scaled + o_m[None, :] * N + o_n[:, None], b_scaled, mask=is_y)
        p_sums = p_next_squares + i_tile * num_tokens + o_m
        tl.store(p_sums, tl.sum(b_x * b_x, axis=0), mask=is_m)


@triton.jit
def _load_squares(
    p_squares: tl.tensor,
    o_m: tl.tensor,
    is_m: tl.tensor,
    num_tokens: tl.tensor,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):
    """All tiles' sums of squares of the rows, [PARTS_PADDED, BLOCK_M]."""
    o_p = tl.arange(0, PARTS_PADDED)[:, None]
    mask = (o_p < PARTS) & is_m[None, :]
    return tl.load(p_squares + o_p * num_tokens + o_m[None, :], mask=mask, other=0.0)


@functools.cache
def split_scratch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The device's memory for split products: sums, and counters that are zero between kernels.

    One stream a device may run split products at a time. The first call allocates, so it must come
    before any capture; running a step once for warm-up is enough.
    """
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "scratch memory inside a capture"
    sums = torch.empty(PARTIAL_SUMS, dtype=torch.float32, device=device)
    return sums, torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def skinny_linear(
    x_MK: torch.Tensor,
    weight: Weight,
    out_MN: torch.Tensor,
    config: SkinnyConfig,
    *,
    bias_N: torch.Tensor | None = None,
    epilogue: Epilogue = "store",
    rows: ScaledRows | None = None,
    next_weight_N: torch.Tensor | None = None,
    next_rows: ScaledRows | None = None,
) -> None:
    """Runs one product of 1..128 tokens; for "silu" `weight` holds gate's rows, then up's.

    All tensors are contiguous. "add" reads and writes `out_MN`. With `rows`, whose scaled rows are
    `x_MK`, the product is that behind a norm; `next_rows` are left for the norm of `next_weight_N`.
    """
    num_tokens, num_inputs = x_MK.shape
    num_outputs = out_MN.shape[1]
    halves = 2 if epilogue == "silu" else 1
    weight_NK, scale_N = stored_parts(weight)
    assert num_tokens <= MAX_TOKENS, f"{num_tokens} tokens, at most {MAX_TOKENS}"
    assert weight_NK.shape == (halves * num_outputs, num_inputs) and len(out_MN) == num_tokens, (
        f"{tuple(x_MK.shape)} by {tuple(weight_NK.shape)} into {tuple(out_MN.shape)}"
    )
    assert all(t is None or t.is_contiguous() for t in (x_MK, weight_NK, scale_N, out_MN, bias_N))
    assert epilogue != "silu" or (config.split_k == 1 and bias_N is None)
    block_m = max(16, triton.next_power_of_2(num_tokens))
    tiles = triton.cdiv(num_outputs, config.block_n)
    parts = 0 if rows is None else len(rows.squares_PT)
    assert next_rows is None or (epilogue == "add" and len(next_rows.squares_PT) == tiles)
    sums, arrived = x_MK, x_MK
    if config.split_k > 1:
        sums, arrived = split_scratch(x_MK.device)
        size = tiles * config.split_k * config.block_n * block_m
        assert size <= len(sums) and tiles <= len(arrived), f"{config} needs too much scratch"
    _skinny_kernel[(tiles, config.split_k)](
        x_MK,
        weight_NK,
        x_MK if scale_N is None else scale_N,
        x_MK if bias_N is None else bias_N,
        out_MN,
        sums,
        arrived,
        x_MK if rows is None else rows.squares_PT,
        next_weight_N,
        None if next_rows is None else next_rows.scaled_TE,
        None if next_rows is None else next_rows.squares_PT,
        num_tokens,
        0.0 if rows is None else rows.eps,
        N=num_outputs,
        K=num_inputs,
        EPILOGUE=epilogue,
        HAS_SCALE=scale_N is not None,
        HAS_BIAS=bias_N is not None,
        PARTS=parts,
        PARTS_PADDED=triton.next_power_of_2(max(parts, 1)),
        HAS_NEXT=next_rows is not None,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        STAGES=config.num_stages,
        PRECISION="ieee" if x_MK.dtype == torch.float32 else "tf32",
        PDL=dependent_launch.ENABLED,
        num_warps=config.num_warps,
        **dependent_launch.launch_options(),
    )
