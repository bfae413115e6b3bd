"""A matrix in 8-bit floats (e4m3): values, and a scale for all of one output's.

    weight[n, k] = scale[n] * value[n, k],   scale[n] = max_k |weight[n, k]| / 448

Owns the form and the rounding to it, which runs where the matrix is, one matrix at a time; computes
no product. Filled by the worker's weights, read by `gemv`, `skinny_linear` and `scaled_product`.
Legend: N outputs, K inputs.
"""

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
MAX_VALUE = 448.0
"""The largest number that e4m3 has."""


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """The matrix, whole or some of its rows; both tensors are contiguous."""

    values_NK: torch.Tensor
    scale_N: torch.Tensor
    """float32."""
    dtype: torch.dtype
    """Of the inputs that it is multiplied by."""

    @staticmethod
    def empty(
        num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device
    ) -> "Fp8Weight":
        return Fp8Weight(
            torch.empty(num_outputs, num_inputs, dtype=FP8, device=device),
            torch.empty(num_outputs, dtype=torch.float32, device=device),
            dtype,
        )

    @property
    def shape(self) -> torch.Size:
        return self.values_NK.shape

    @property
    def num_bytes(self) -> int:
        return self.values_NK.nbytes + self.scale_N.nbytes

    def rows(self, first: int, count: int) -> "Fp8Weight":
        """A view of some outputs."""
        rows = slice(first, first + count)
        return Fp8Weight(self.values_NK[rows], self.scale_N[rows], self.dtype)

    def store(self, weight_NK: torch.Tensor) -> None:
        """Rounds a matrix of any float type to the nearest values; ValueError if it is not finite.

        Beside this matrix there are two copies of `weight_NK` in float32 for a moment.
        """
        weight_NK = weight_NK.to(self.values_NK.device).float()
        largest_N = weight_NK.abs().amax(1)
        if not bool(largest_N.isfinite().all()):
            raise ValueError("weights that are not finite cannot be rounded to fp8")
        scale_N = largest_N / MAX_VALUE
        # A scale below the normal floats would be rounded itself: such a row is zero.
        scale_N[scale_N < torch.finfo(torch.float32).tiny] = 1.0
        self.values_NK.copy_(weight_NK / scale_N[:, None])
        self.scale_N.copy_(scale_N)

    def exact(self) -> torch.Tensor:
        """The matrix that the values stand for, in float32."""
        return self.values_NK.float() * self.scale_N[:, None]


Weight = torch.Tensor | Fp8Weight


def stored_parts(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What lies in memory: values, and scales where there are some."""
    if isinstance(weight, Fp8Weight):
        return weight.values_NK, weight.scale_N
    return weight, None


def exact_weight(weight: Weight) -> torch.Tensor:
    """The matrix in float32, for references."""
    return weight.exact() if isinstance(weight, Fp8Weight) else weight.float()
