"""The products of a layer, each with what stands before and after it, and the choice of kernel.

Four operations: a norm before a product, a norm before gate and up with SiLU behind them, a product
added to the residual, and a bare product. Few tokens run in this folder's kernels where the table
says that these are faster, all else in the library's product with a kernel before or after it; for
8-bit weights that is the one which takes 8-bit activations, in the memory `rounded`.
Between two of these kernels a norm needs none of its own: see `scaled_rows`.
Nothing is allocated but the split products' scratch, once. Called by the worker's layers.
Legend: T tokens, E width, N outputs, K inputs, F MLP width.
"""

import dataclasses
import functools

import torch
import triton

from cearx.kernels.fp8_weight import Fp8Weight, Weight, exact_weight
from cearx.kernels.gemv import Epilogue, GemvConfig, gemv
from cearx.kernels.linear_table import FP8_TABLE, TABLE
from cearx.kernels.norm import rms_norm, rms_norm_reference
from cearx.kernels.scaled_product import RoundedRows, can_run, round_rows, scaled_product
from cearx.kernels.scaled_rows import NextNorm, ScaledRows, rows_to_leave
from cearx.kernels.silu_mul import silu_mul, silu_mul_reference
from cearx.kernels.skinny_linear import MAX_TOKENS, SkinnyConfig, skinny_linear

Choice = GemvConfig | SkinnyConfig | None

FEW_TOKENS = 64
"""Up to here 8-bit weights are multiplied by exact activations, where the table says nothing."""
MULTIPROCESSORS = 132
"""Programs that a product of few outputs is split for."""


@functools.cache
def choose(num_tokens: int, num_outputs: int, num_inputs: int) -> Choice:
    """The kernel for a product with a matrix [num_outputs, num_inputs]; None is the library's."""
    if num_tokens == 0 or num_tokens > MAX_TOKENS:
        return None
    key = (triton.next_power_of_2(num_tokens), num_outputs, num_inputs)
    if key in TABLE:
        return TABLE[key]
    if num_tokens > 1:
        return None
    block_k = min(1024, triton.next_power_of_2(num_inputs))
    # A warp loads 256 numbers at once; where a row's step is as long as all warps' loads together,
    # inputs and weights lie alike in the registers and need no exchange.
    return GemvConfig(block_n=2, block_k=block_k, num_warps=max(1, block_k // 256), ahead=2)


@functools.cache
def choose_fp8(num_tokens: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Choice:
    """The same for 8-bit weights and inputs of a type; None only where the library can run it."""
    key = (triton.next_power_of_2(max(1, num_tokens)), num_outputs, num_inputs)
    has_library = can_run(num_outputs, num_inputs, dtype)
    if num_tokens <= MAX_TOKENS and key in FP8_TABLE:
        choice = FP8_TABLE[key]
        if choice is not None or has_library:
            return choice
    if num_tokens > FEW_TOKENS and has_library:
        return None
    if num_tokens == 1:
        # Twice the rows of the 16-bit rule: as many bytes are on their way.
        block_k = min(2048, triton.next_power_of_2(num_inputs))
        return GemvConfig(block_n=4, block_k=block_k, num_warps=max(1, block_k // 256), ahead=2)
    config = SkinnyConfig(block_n=64, block_k=128, num_warps=4, num_stages=5)
    if num_tokens > 16:
        config = dataclasses.replace(config, num_stages=3)
    split_k = triton.cdiv(MULTIPROCESSORS, triton.cdiv(num_outputs, config.block_n))
    most = max(1, num_inputs // (4 * config.block_k))
    return dataclasses.replace(config, split_k=min(split_k, most))


def choice_for(num_tokens: int, weight: Weight, *, gated: bool = False) -> Choice:
    """Which kernel multiplies these; `gated` says that SiLU follows."""
    if not isinstance(weight, Fp8Weight):
        return choose(num_tokens, *weight.shape)
    choice = choose_fp8(num_tokens, *weight.shape, weight.dtype)
    if gated and isinstance(choice, SkinnyConfig):
        return dataclasses.replace(choice, split_k=1)  # SiLU has no place behind a split
    return choice


def takes_rows(num_tokens: int, weight: Weight, *, gated: bool) -> bool:
    """Whether the product behind a norm can use the rows that the product before it leaves."""
    choice = choice_for(num_tokens, weight, gated=gated)
    return (
        isinstance(choice, SkinnyConfig)
        and num_tokens <= MAX_TOKENS
        and weight.dtype != torch.float16
        and not (gated and choice.split_k > 1)
    )


def norm_linear(
    x_TE: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
    weight: Weight,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor,
    scratch_TE: torch.Tensor,
    rows: ScaledRows | None = None,
    rounded: RoundedRows | None = None,
) -> None:
    """out = rms_norm(x) @ weight^T + bias. `scratch_TE` is like `x_TE` and may be overwritten.

    `rows` are what the product before left of `x_TE`; give them only where `takes_rows`.
    """
    choice = choice_for(len(x_TE), weight)
    if isinstance(choice, GemvConfig):
        gemv(x_TE, weight, out_TN, choice, norm_weight_K=norm_weight_E, eps=eps, bias_N=bias_N)
        return
    if rows is not None:
        assert isinstance(choice, SkinnyConfig)
        skinny_linear(rows.scaled_TE, weight, out_TN, choice, bias_N=bias_N, rows=rows)
        return
    if choice is None and isinstance(weight, Fp8Weight):
        _rounded_product(x_TE, weight, bias_N, out_TN, rounded, norm_weight_E, eps)
        return
    rms_norm(x_TE, norm_weight_E, eps, scratch_TE)
    _product(scratch_TE, weight, bias_N, out_TN, choice)


def norm_gate_up(
    x_TE: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
    weight: Weight,
    out_TF: torch.Tensor,
    scratch_TE: torch.Tensor,
    scratch_T2F: torch.Tensor,
    rows: ScaledRows | None = None,
    rounded: RoundedRows | None = None,
) -> None:
    """out = SiLU(n @ gate^T) * (n @ up^T) with n = rms_norm(x); weight rows: gate's, then up's.

    The scratch tensors, like `x_TE` and of 2 F columns, may be overwritten; `rows` as above.
    """
    choice = choice_for(len(x_TE), weight, gated=True)
    if isinstance(choice, GemvConfig):
        gemv(x_TE, weight, out_TF, choice, norm_weight_K=norm_weight_E, eps=eps, epilogue="silu")
        return
    if rows is not None:
        assert isinstance(choice, SkinnyConfig)
        skinny_linear(rows.scaled_TE, weight, out_TF, choice, epilogue="silu", rows=rows)
        return
    if choice is None and isinstance(weight, Fp8Weight):
        _rounded_product(x_TE, weight, None, scratch_T2F, rounded, norm_weight_E, eps)
        silu_mul(scratch_T2F, out_TF)
        return
    rms_norm(x_TE, norm_weight_E, eps, scratch_TE)
    # The table may know this shape from a product without SiLU, whose split has no place for it.
    if choice is not None and choice.split_k == 1:
        _skinny(scratch_TE, weight, out_TF, choice, epilogue="silu")
        return
    assert isinstance(weight, torch.Tensor)
    torch.mm(scratch_TE, weight.t(), out=scratch_T2F)
    silu_mul(scratch_T2F, out_TF)


def linear_add(
    x_TK: torch.Tensor,
    weight: Weight,
    bias_N: torch.Tensor | None,
    residual_TN: torch.Tensor,
    next_norm: NextNorm | None = None,
    rounded: RoundedRows | None = None,
) -> ScaledRows | None:
    """residual += x @ weight^T + bias, in place.

    Returns rows for the product behind `next_norm`, where the kernel that runs can leave them.
    """
    choice = choice_for(len(x_TK), weight)
    if choice is None:
        _add_by_library(x_TK, weight, bias_N, residual_TN, rounded)
        return None
    next_rows, next_weight_N = None, None
    if next_norm is not None and len(x_TK) <= MAX_TOKENS:
        tiles = triton.cdiv(len(residual_TN[0]), choice.block_n)
        next_rows = rows_to_leave(next_norm, tiles, len(x_TK))
        next_weight_N = next_norm.weight_E
    if next_rows is None and isinstance(choice, SkinnyConfig):
        _skinny(x_TK, weight, residual_TN, choice, bias_N=bias_N, epilogue="add")
        return None
    operands = (x_TK, weight, residual_TN)
    if isinstance(choice, GemvConfig):
        gemv(
            *operands,
            choice,
            bias_N=bias_N,
            epilogue="add",
            next_weight_N=next_weight_N,
            next_rows=next_rows,
        )
    else:
        skinny_linear(
            *operands,
            choice,
            bias_N=bias_N,
            epilogue="add",
            next_weight_N=next_weight_N,
            next_rows=next_rows,
        )
    return next_rows


def _add_by_library(
    x_TK: torch.Tensor,
    weight: Weight,
    bias_N: torch.Tensor | None,
    residual_TN: torch.Tensor,
    rounded: RoundedRows | None,
) -> None:
    if isinstance(weight, Fp8Weight):
        assert rounded is not None, "8-bit weights without memory for 8-bit activations"
        product_TN = rounded.product_TN(*residual_TN.shape)
        _rounded_product(x_TK, weight, bias_N, product_TN, rounded)
        residual_TN.add_(product_TN)
        return
    if bias_N is not None:
        residual_TN.add_(bias_N)
    torch.addmm(residual_TN, x_TK, weight.t(), out=residual_TN)


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, out_TN: torch.Tensor) -> None:
    """out = x @ weight^T."""
    _product(x_TK, weight_NK, None, out_TN, choose(len(x_TK), *weight_NK.shape))


def _product(
    x_TK: torch.Tensor,
    weight: Weight,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor,
    choice: Choice,
) -> None:
    if isinstance(choice, GemvConfig):
        gemv(x_TK, weight, out_TN, choice, bias_N=bias_N)
    elif isinstance(choice, SkinnyConfig):
        _skinny(x_TK, weight, out_TN, choice, bias_N=bias_N)
    else:
        assert isinstance(weight, torch.Tensor), "the library takes no 8-bit weights alone"
        if bias_N is None:
            torch.mm(x_TK, weight.t(), out=out_TN)
        else:
            torch.addmm(bias_N, x_TK, weight.t(), out=out_TN)


def _skinny(
    x_TK: torch.Tensor,
    weight: Weight,
    out_TN: torch.Tensor,
    config: SkinnyConfig,
    *,
    bias_N: torch.Tensor | None = None,
    epilogue: Epilogue = "store",
) -> None:
    """As many tokens at a time as the kernel takes: all, but for what the library cannot run."""
    for first in range(0, len(x_TK), MAX_TOKENS):
        tokens = slice(first, first + MAX_TOKENS)
        skinny_linear(
            x_TK[tokens], weight, out_TN[tokens], config, bias_N=bias_N, epilogue=epilogue
        )


def _rounded_product(
    x_TK: torch.Tensor,
    weight: Fp8Weight,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor,
    rounded: RoundedRows | None,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """The library's product of 8-bit values, behind their norm if there is one."""
    assert rounded is not None, "8-bit weights without memory for 8-bit activations"
    values_TK = round_rows(x_TK, rounded, norm_weight_K, eps)
    scaled_product(values_TK, rounded, weight, bias_N, out_TN)


def norm_linear_reference(
    x_TE: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
    weight: Weight,
    bias_N: torch.Tensor | None,
) -> torch.Tensor:
    """`norm_linear` in plain float32."""
    y_TN = rms_norm_reference(x_TE, norm_weight_E, eps) @ exact_weight(weight).t()
    return y_TN if bias_N is None else y_TN + bias_N.float()


def norm_gate_up_reference(
    x_TE: torch.Tensor, norm_weight_E: torch.Tensor, eps: float, weight: Weight
) -> torch.Tensor:
    """`norm_gate_up` in plain float32."""
    return silu_mul_reference(norm_linear_reference(x_TE, norm_weight_E, eps, weight, None))


def linear_add_reference(
    x_TK: torch.Tensor,
    weight: Weight,
    bias_N: torch.Tensor | None,
    residual_TN: torch.Tensor,
) -> torch.Tensor:
    """`linear_add` in plain float32."""
    y_TN = residual_TN.float() + x_TK.float() @ exact_weight(weight).t()
    return y_TN if bias_N is None else y_TN + bias_N.float()
