"""Root-mean-square normalisation as Llama rounds it.

Owns the arithmetic and its weight: normalise in float32, round to the model's type, then multiply
by the weight. Models build it for hidden states and, per head, for queries and keys.

T tokens, K features, H heads, D head_dim.
"""

import torch
from torch import Tensor

from cearx.worker.weights import WeightSlot


class RMSNorm:
    """`weight * round(x / rms(x))`, the mean square taken over the last dimension of [..., K]."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        self.weight = torch.empty(size, dtype=dtype)
        self._root_size = size**0.5
        self._floor = torch.tensor(size * eps, dtype=torch.float32).sqrt_()

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": WeightSlot(tuple(self.weight.shape), self._fill)}

    def _fill(self, weight_K: Tensor) -> None:
        self.weight.copy_(weight_K)

    def forward(self, x: Tensor) -> Tensor:
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(K * eps)) / sqrt(K), in fewer passes.
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        normalised: Tensor = x / length.hypot_(self._floor).div_(self._root_size)
        if normalised.dtype != x.dtype:
            normalised = normalised.to(x.dtype)
        return normalised.mul_(self.weight)


class QKNorm(RMSNorm):
    """One RMSNorm for every query head and one for every key head, in one pass over [T, H, D]."""

    def __init__(
        self, num_q_heads: int, num_k_heads: int, head_dim: int, eps: float, dtype: torch.dtype
    ) -> None:
        super().__init__(head_dim, eps, dtype)
        self.weight = torch.empty(num_q_heads + num_k_heads, head_dim, dtype=dtype)
        self._num_q_heads = num_q_heads

    def slots(self) -> dict[str, WeightSlot]:
        shape = (self.weight.shape[1],)
        return {
            "q.weight": WeightSlot(shape, self._fill_q),
            "k.weight": WeightSlot(shape, self._fill_k),
        }

    def _fill_q(self, weight_D: Tensor) -> None:
        self.weight[: self._num_q_heads] = weight_D

    def _fill_k(self, weight_D: Tensor) -> None:
        self.weight[self._num_q_heads :] = weight_D
