"""Rotary position embeddings: frequencies under every supported scaling, and their application.

Owns the arithmetic in the half-split form (feature i is paired with i + D/2). Angles, cos and sin
are float32 and rounded to the model's type once. A model asks for a step's tables once, layers
apply them.

T tokens, H heads, D head_dim, F = D / 2 frequencies.
"""

import math

import torch
from torch import Tensor

from cearx.worker.model_config import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)


class Rotary:
    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.frequencies_F = inverse_frequencies(rope, head_dim)
        self.amplitude = amplitude(rope)

    def tables(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each [T, 1, D]: x * cos + roll(x, D/2) * sin is the rotation."""
        angles_TF = positions_T[:, None].float() * self.frequencies_F
        cos_TF = angles_TF.cos() * self.amplitude
        sin_TF = angles_TF.sin() * self.amplitude
        cos_TD = torch.cat((cos_TF, cos_TF), dim=-1).to(self.dtype)
        sin_TD = torch.cat((-sin_TF, sin_TF), dim=-1).to(self.dtype)
        return cos_TD[:, None], sin_TD[:, None]


def rotate_in_place(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> None:
    swapped_THD = x_THD.roll(x_THD.shape[-1] // 2, -1)
    x_THD.mul_(cos_T1D).addcmul_(swapped_THD, sin_T1D)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of every feature pair, [F] in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case DivisorScaling(divisors=divisors):
            if len(divisors) != head_dim // 2:
                raise ValueError(f"{len(divisors)} RoPE divisors for {head_dim // 2} frequencies")
            return frequencies / torch.tensor(divisors, dtype=torch.float32)
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)
        case YarnScaling():
            return _yarn(frequencies, rope.scaling, rope.theta, head_dim)


def amplitude(rope: RopeConfig) -> float:
    """The factor on cos and sin; only YaRN changes it."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(frequencies_F: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Kept above high_freq_factor turns in the original context, divided below low_freq_factor."""
    turns_F = scaling.original_max_position_embeddings * frequencies_F / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept_F = ((turns_F - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - kept_F) * frequencies_F / scaling.factor + kept_F * frequencies_F


def _yarn(frequencies_F: Tensor, scaling: YarnScaling, theta: float, head_dim: int) -> Tensor:
    """A ramp over feature pairs from kept (many turns) to divided by factor (few turns)."""

    def pair_with_turns(turns: float) -> float:
        wavelength_ratio = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength_ratio) / (2 * math.log(theta))

    low, high = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    pairs_F = torch.arange(head_dim // 2, dtype=torch.float32)
    divided_F = ((pairs_F - low) / width).clamp(0.0, 1.0)
    return (1 - divided_F) * frequencies_F + divided_F * frequencies_F / scaling.factor
