"""SiLU(gate) * up of a gated MLP, where gate and up stand side by side in a row.

Owns the elementwise kernel for what a library product left in memory; small batches get it as the
end of `skinny_linear`'s products instead. Called by `layer_linear`. Legend: T tokens, F MLP width.
"""

import torch
import triton
import triton.language as tl

BLOCK_F = 1024


@triton.jit
def silu_times(b_gate: tl.tensor, b_up: tl.tensor):
    """gate * sigmoid(gate) * up of float32 blocks."""
    return b_gate / (1.0 + tl.exp(-b_gate)) * b_up


@triton.jit
def _silu_mul_kernel(
    p_gate_up: tl.tensor,
    p_out: tl.tensor,
    F: tl.constexpr,
    BLOCKS_A_ROW: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    i_t = (tl.program_id(0) // BLOCKS_A_ROW).to(tl.int64)
    o_f = (tl.program_id(0) % BLOCKS_A_ROW) * BLOCK_F + tl.arange(0, BLOCK_F)
    p_row = p_gate_up + i_t * (2 * F)
    b_gate = tl.load(p_row + o_f, mask=o_f < F, other=0.0).to(tl.float32)
    b_up = tl.load(p_row + F + o_f, mask=o_f < F, other=0.0).to(tl.float32)
    b_out = silu_times(b_gate, b_up).to(p_out.dtype.element_ty)
    tl.store(p_out + i_t * F + o_f, b_out, mask=o_f < F)


def silu_mul(gate_up_T2F: torch.Tensor, out_TF: torch.Tensor) -> None:
    """Writes SiLU of the first half of each row times its second half."""
    num_tokens, width = out_TF.shape
    assert gate_up_T2F.shape == (num_tokens, 2 * width), (
        f"gate and up of shape {tuple(gate_up_T2F.shape)} for an output {tuple(out_TF.shape)}"
    )
    assert gate_up_T2F.is_contiguous() and out_TF.is_contiguous()
    if num_tokens == 0:
        return
    blocks_a_row = triton.cdiv(width, BLOCK_F)
    _silu_mul_kernel[(num_tokens * blocks_a_row,)](
        gate_up_T2F,
        out_TF,
        F=width,
        BLOCKS_A_ROW=blocks_a_row,
        BLOCK_F=BLOCK_F,
        num_warps=4,
    )


def silu_mul_reference(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """The same in plain float32."""
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TF) * up_TF
