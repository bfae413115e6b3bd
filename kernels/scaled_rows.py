"""Rows for a product behind an RMSNorm, made by the product before the norm.

    rms_norm(x) @ W^T = (x * weight) @ W^T / sqrt(mean(x^2) + eps)

Whoever adds to the residual x has its new values at hand: it also writes x * weight, rounded, and
every tile's sums of squares; the next product divides its sums by the root at its end. That saves
the norm's kernel, which few tokens spend on its start and end. The sums are added in a fixed order.
Owns the two types; `layer_linear` decides when they are used. In float16 x * weight may overflow,
so there they are not. Legend: T tokens, E width, P tiles of the product that made the rows.
"""

from dataclasses import dataclass

import torch
import triton

MAX_SQUARES = 8192
"""Sums of squares that every program of the next product reads: tiles times padded tokens."""


@dataclass(frozen=True, eq=False)
class NextNorm:
    """The norm behind a product that adds to the residual, and where its rows may be left."""

    weight_E: torch.Tensor
    eps: float
    scaled_TE: torch.Tensor
    """Like the residual."""
    squares: torch.Tensor
    """float32 memory of MAX_SQUARES numbers."""


@dataclass(frozen=True, eq=False)
class ScaledRows:
    """What a product left for the next."""

    scaled_TE: torch.Tensor
    """x * weight in the model's type."""
    squares_PT: torch.Tensor
    """float32 sums of x^2 by tile; their sum over P belongs to the whole row."""
    eps: float


def rows_to_leave(next_norm: NextNorm, num_parts: int, num_tokens: int) -> ScaledRows | None:
    """Views for a product of `num_parts` tiles; None where the next would read too many sums."""
    if num_parts * max(16, triton.next_power_of_2(num_tokens)) > MAX_SQUARES:
        return None
    squares_PT = next_norm.squares[: num_parts * num_tokens].view(num_parts, num_tokens)
    return ScaledRows(next_norm.scaled_TE[:num_tokens], squares_PT, next_norm.eps)
