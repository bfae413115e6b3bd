"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, a row a token, in float32 inside.

Owns the norm of whole rows as a kernel of its own; never adds the residual, which the products do.
Called by `layer_linear` where the norm is not fused into a product, and for the last norm.
Legend: T tokens, E row width.
"""

import torch
import triton
import triton.language as tl

from cearx.kernels import dependent_launch
from cearx.kernels.dependent_launch import let_next_start, wait_for_previous

FEW_ROWS = 264
"""Up to here every row has a multiprocessor's attention, and more warps a row shorten it."""


@triton.jit
def _rms_norm_kernel(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_out: tl.tensor,
    eps: tl.tensor,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    o_e = tl.arange(0, BLOCK_E)
    o_row = tl.program_id(0).to(tl.int64) * E
    b_weight = tl.load(p_weight + o_e, mask=o_e < E, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    b_x = tl.load(p_x + o_row + o_e, mask=o_e < E, other=0.0).to(tl.float32)
    let_next_start(PDL)
    inverse_rms = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / E + eps)
    b_y = b_x * inverse_rms * b_weight
    tl.store(p_out + o_row + o_e, b_y.to(p_out.dtype.element_ty), mask=o_e < E)


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, out_TE: torch.Tensor) -> None:
    """Normalises every row of `x_TE` [num_tokens, width] into `out_TE`, which may be `x_TE`."""
    num_tokens, width = x_TE.shape
    assert out_TE.shape == x_TE.shape and weight_E.shape == (width,), (
        f"norm of {tuple(x_TE.shape)} by {tuple(weight_E.shape)} into {tuple(out_TE.shape)}"
    )
    assert x_TE.is_contiguous() and out_TE.is_contiguous() and weight_E.is_contiguous()
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(width)
    values_a_warp = 256 if num_tokens <= FEW_ROWS else 1024
    _rms_norm_kernel[(num_tokens,)](
        x_TE,
        weight_E,
        out_TE,
        eps,
        E=width,
        BLOCK_E=block,
        PDL=dependent_launch.ENABLED,
        num_warps=min(max(block // values_a_warp, 1), 16),
        **dependent_launch.launch_options(),
    )


def rms_norm_reference(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in plain float32."""
    x_TE = x_TE.float()
    return x_TE * torch.rsqrt(x_TE.square().mean(-1, keepdim=True) + eps) * weight_E.float()
