"""The products of a layer, each with what stands before and after it, and the choice of kernel.

Four operations: a norm before a product, a norm before gate and up with SiLU behind them, a product
added to the residual, and a bare product. Few tokens run in this folder's kernels where the table
says that these are faster, all else in the library's product with a kernel before or after it.
Between two of these kernels a norm needs none of its own: see `scaled_rows`.
Nothing is allocated but the split products' scratch, once. Called by the worker's layers.
Legend: T tokens, E width, N outputs, K inputs, F MLP width.
"""

import functools

import torch
import triton

from cearx.kernels.gemv import GemvConfig, gemv
from cearx.kernels.linear_table import TABLE
from cearx.kernels.norm import rms_norm, rms_norm_reference
from cearx.kernels.scaled_rows import NextNorm, ScaledRows, rows_to_leave
from cearx.kernels.silu_mul import silu_mul, silu_mul_reference
from cearx.kernels.skinny_linear import MAX_TOKENS, SkinnyConfig, skinny_linear

Choice = GemvConfig | SkinnyConfig | None


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


def takes_rows(num_tokens: int, weight_NK: torch.Tensor, *, gated: bool) -> bool:
    """Whether the product behind a norm can use the rows that the product before it leaves."""
    choice = choose(num_tokens, *weight_NK.shape)
    return (
        isinstance(choice, SkinnyConfig)
        and weight_NK.dtype != torch.float16
        and not (gated and choice.split_k > 1)
    )


def norm_linear(
    x_TE: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor,
    scratch_TE: torch.Tensor,
    rows: ScaledRows | None = None,
) -> None:
    """out = rms_norm(x) @ weight^T + bias. `scratch_TE` is like `x_TE` and may be overwritten.

    `rows` are what the product before left of `x_TE`; give them only where `takes_rows`.
    """
    choice = choose(len(x_TE), *weight_NK.shape)
    if isinstance(choice, GemvConfig):
        gemv(
            x_TE,
            weight_NK,
            out_TN,
            choice,
            norm_weight_K=norm_weight_E,
            eps=eps,
            bias_N=bias_N,
        )
        return
    if rows is not None:
        assert isinstance(choice, SkinnyConfig)
        skinny_linear(rows.scaled_TE, weight_NK, out_TN, choice, bias_N=bias_N, rows=rows)
        return
    rms_norm(x_TE, norm_weight_E, eps, scratch_TE)
    _product(scratch_TE, weight_NK, bias_N, out_TN, choice)


def norm_gate_up(
    x_TE: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
    weight_2FE: torch.Tensor,
    out_TF: torch.Tensor,
    scratch_TE: torch.Tensor,
    scratch_T2F: torch.Tensor,
    rows: ScaledRows | None = None,
) -> None:
    """out = SiLU(n @ gate^T) * (n @ up^T) with n = rms_norm(x); weight rows: gate's, then up's.

    The scratch tensors, like `x_TE` and of 2 F columns, may be overwritten; `rows` as above.
    """
    choice = choose(len(x_TE), *weight_2FE.shape)
    if isinstance(choice, GemvConfig):
        gemv(
            x_TE,
            weight_2FE,
            out_TF,
            choice,
            norm_weight_K=norm_weight_E,
            eps=eps,
            epilogue="silu",
        )
        return
    if rows is not None:
        assert isinstance(choice, SkinnyConfig)
        skinny_linear(rows.scaled_TE, weight_2FE, out_TF, choice, epilogue="silu", rows=rows)
        return
    rms_norm(x_TE, norm_weight_E, eps, scratch_TE)
    # The table may know this shape from a product without SiLU, whose split has no place for it.
    if choice is not None and choice.split_k == 1:
        skinny_linear(scratch_TE, weight_2FE, out_TF, choice, epilogue="silu")
        return
    torch.mm(scratch_TE, weight_2FE.t(), out=scratch_T2F)
    silu_mul(scratch_T2F, out_TF)


def linear_add(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    residual_TN: torch.Tensor,
    next_norm: NextNorm | None = None,
) -> ScaledRows | None:
    """residual += x @ weight^T + bias, in place.

    Returns rows for the product behind `next_norm`, where the kernel that runs can leave them.
    """
    choice = choose(len(x_TK), *weight_NK.shape)
    if choice is None:
        if bias_N is not None:
            residual_TN.add_(bias_N)
        torch.addmm(residual_TN, x_TK, weight_NK.t(), out=residual_TN)
        return None
    next_rows, next_weight_N = None, None
    if next_norm is not None:
        tiles = triton.cdiv(len(weight_NK), choice.block_n)
        next_rows = rows_to_leave(next_norm, tiles, len(x_TK))
        next_weight_N = next_norm.weight_E
    operands = (x_TK, weight_NK, residual_TN)
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


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, out_TN: torch.Tensor) -> None:
    """out = x @ weight^T."""
    _product(x_TK, weight_NK, None, out_TN, choose(len(x_TK), *weight_NK.shape))


def _product(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor,
    choice: Choice,
) -> None:
    if isinstance(choice, GemvConfig):
        gemv(x_TK, weight_NK, out_TN, choice, bias_N=bias_N)
    elif isinstance(choice, SkinnyConfig):
        skinny_linear(x_TK, weight_NK, out_TN, choice, bias_N=bias_N)
    elif bias_N is None:
        torch.mm(x_TK, weight_NK.t(), out=out_TN)
    else:
        torch.addmm(bias_N, x_TK, weight_NK.t(), out=out_TN)


def norm_linear_reference(
    x_TE: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
) -> torch.Tensor:
    """`norm_linear` in plain float32."""
    y_TN = rms_norm_reference(x_TE, norm_weight_E, eps) @ weight_NK.float().t()
    return y_TN if bias_N is None else y_TN + bias_N.float()


def norm_gate_up_reference(
    x_TE: torch.Tensor, norm_weight_E: torch.Tensor, eps: float, weight_2FE: torch.Tensor
) -> torch.Tensor:
    """`norm_gate_up` in plain float32."""
    return silu_mul_reference(norm_linear_reference(x_TE, norm_weight_E, eps, weight_2FE, None))


def linear_add_reference(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    residual_TN: torch.Tensor,
) -> torch.Tensor:
    """`linear_add` in plain float32."""
    y_TN = residual_TN.float() + x_TK.float() @ weight_NK.float().t()
    return y_TN if bias_N is None else y_TN + bias_N.float()
