"""Products of many tokens with an 8-bit matrix, by the library: both sides in e4m3, both scaled.

    out = (x8 @ w8^T) * x_scale * w_scale + bias
    x8 = x / x_scale,   x_scale = max |x| / 448 of each token

Tensor cores multiply e4m3 at twice the speed of 16-bit floats, so from some hundred tokens on it
pays to round the activations as well; fewer tokens keep theirs (`gemv`, `skinny_linear`). Owns the
rounding of activations, the norm before it included, and its memory. Called by `layer_linear`.
Legend: T tokens, N outputs, K inputs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cearx.kernels.fp8_weight import FP8, MAX_VALUE, Fp8Weight

ALIGNMENT = 16
"""Inputs and outputs of the library's product are multiples of it."""


@dataclass(frozen=True, eq=False)
class RoundedRows:
    """Memory for the activations of one product, used again by the next."""

    values: torch.Tensor
    """Of all tokens, one behind the other."""
    scale_T1: torch.Tensor
    product: torch.Tensor
    """What is added to the residual afterwards, in the model's type."""

    @staticmethod
    def allocate(
        max_num_tokens: int,
        max_inputs: int,
        max_outputs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "RoundedRows":
        """For products of at most so many inputs, and outputs that are added."""
        return RoundedRows(
            torch.empty(max_num_tokens * max_inputs, dtype=FP8, device=device),
            torch.empty(max_num_tokens, 1, dtype=torch.float32, device=device),
            torch.empty(max_num_tokens * max_outputs, dtype=dtype, device=device),
        )

    def product_TN(self, num_tokens: int, num_outputs: int) -> torch.Tensor:
        return self.product[: num_tokens * num_outputs].view(num_tokens, num_outputs)


@triton.jit
def _round_rows_kernel(
    p_x: tl.tensor,
    p_norm: tl.tensor,
    p_values: tl.tensor,
    p_scale: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAX: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K)
    if HAS_NORM:
        b_norm = tl.load(p_norm + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + i_t * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    if HAS_NORM:
        b_x = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / K + eps) * b_norm
    # The bound keeps a row of zeros from dividing by zero.
    scale = tl.maximum(tl.max(tl.abs(b_x), axis=0) / MAX, 1e-12)
    tl.store(p_values + i_t * K + o_k, (b_x / scale).to(p_values.dtype.element_ty), mask=o_k < K)
    tl.store(p_scale + i_t, scale)


def round_rows(
    x_TK: torch.Tensor,
    rows: RoundedRows,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rounds each token's inputs, or their RMSNorm, into `rows`; returns the values [T, K]."""
    num_tokens, num_inputs = x_TK.shape
    assert x_TK.is_contiguous(), f"rows of stride {x_TK.stride()}"
    assert num_tokens <= len(rows.scale_T1) and x_TK.numel() <= len(rows.values), (
        f"{tuple(x_TK.shape)} into room for {len(rows.scale_T1)} tokens, {len(rows.values)} values"
    )
    values_TK = rows.values[: x_TK.numel()].view(num_tokens, num_inputs)
    if num_tokens == 0:
        return values_TK
    block = triton.next_power_of_2(num_inputs)
    _round_rows_kernel[(num_tokens,)](
        x_TK,
        x_TK if norm_weight_K is None else norm_weight_K,
        values_TK,
        rows.scale_T1,
        eps,
        K=num_inputs,
        BLOCK_K=block,
        MAX=MAX_VALUE,
        HAS_NORM=norm_weight_K is not None,
        num_warps=min(max(block // 512, 1), 16),
    )
    return values_TK


def can_run(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> bool:
    """Whether the library has the product."""
    return dtype == torch.bfloat16 and num_outputs % ALIGNMENT == 0 == num_inputs % ALIGNMENT


def scaled_product(
    values_TK: torch.Tensor,
    rows: RoundedRows,
    weight: Fp8Weight,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor,
) -> None:
    """out = x @ weight^T + bias of what `round_rows` left; `out_TN` is contiguous bfloat16."""
    torch._scaled_mm(
        values_TK,
        weight.values_NK.t(),
        rows.scale_T1[: len(values_TK)],
        weight.scale_N[None, :],
        bias=bias_N,
        out_dtype=out_TN.dtype,
        use_fast_accum=True,
        out=out_TN,
    )
