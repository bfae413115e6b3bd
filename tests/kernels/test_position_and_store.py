"""Rotary positions, query-key norms and the write of keys and values."""

import pytest
import torch
from torch import Tensor

from cearx.kernels.position_and_store import (
    position_and_store,
    reference_position_and_store,
)
from cearx.worker.model_config import RopeConfig
from cearx.worker.norm import QKNorm
from cearx.worker.rotary import Rotary, rotate_in_place

EPS = 1e-6
MAX_POSITIONS = 600


def tables(head_dim: int) -> Tensor:
    """cos then sin of every position, from the CPU worker's frequencies."""
    rotary = Rotary(RopeConfig(theta=10_000.0), head_dim, torch.float32)
    angles_LF = torch.arange(MAX_POSITIONS)[:, None].float() * rotary.frequencies_F
    return torch.cat((angles_LF.cos(), angles_LF.sin()), dim=-1)


class Case:
    """Inputs of one call on the CPU; `run` copies them to a device and returns what came back."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        num_tokens: int,
        dtype: torch.dtype,
        with_norm: bool,
    ) -> None:
        self.num_q_heads, self.num_kv_heads, self.head_dim, self.block_size = shape
        torch.manual_seed(num_tokens)
        num_heads = self.num_q_heads + 2 * self.num_kv_heads
        self.qkv_TX = torch.randn(num_tokens, num_heads * self.head_dim).mul_(3).to(dtype)
        self.norms: tuple[Tensor | None, Tensor | None] = (None, None)
        if with_norm:
            self.norms = (
                torch.rand(self.head_dim).add_(0.5).to(dtype),
                torch.rand(self.head_dim).add_(0.5).to(dtype),
            )
        self.positions_T = torch.randint(MAX_POSITIONS, (num_tokens,))
        num_blocks = num_tokens // self.block_size + 3
        self.slots_T = torch.randperm(num_blocks * self.block_size)[:num_tokens]
        self.kv_B2KPD = torch.full(
            (num_blocks + 1, 2, self.num_kv_heads, self.block_size, self.head_dim),
            torch.nan,
            dtype=dtype,
        )
        self.cos_sin_LD = tables(self.head_dim)

    def run(self, device: torch.device) -> tuple[Tensor, Tensor]:
        qkv_TX = self.qkv_TX.clone().to(device)
        kv_B2KPD = self.kv_B2KPD.clone().to(device)
        q_norm, k_norm = (None if w is None else w.to(device) for w in self.norms)
        position_and_store(
            qkv_TX,
            q_norm,
            k_norm,
            EPS,
            self.cos_sin_LD.to(device),
            self.positions_T.to(device),
            self.slots_T.to(device),
            kv_B2KPD,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
        )
        return qkv_TX.cpu(), kv_B2KPD.cpu()

    def reference(self) -> tuple[Tensor, Tensor]:
        return reference_position_and_store(
            self.qkv_TX,
            *self.norms,
            EPS,
            self.cos_sin_LD,
            self.positions_T,
            self.slots_T,
            self.kv_B2KPD,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
        )

    def cpu_model(self) -> tuple[Tensor, Tensor]:
        """The worker's own layers on the CPU: q and k, [T, N + K, D], and v, [T, K, D]."""
        x_THD = self.qkv_TX.unflatten(1, (-1, self.head_dim)).clone()
        num_qk = self.num_q_heads + self.num_kv_heads
        qk_THD = x_THD[:, :num_qk]
        q_norm, k_norm = self.norms
        if q_norm is not None and k_norm is not None:
            norm = QKNorm(
                self.num_q_heads, self.num_kv_heads, self.head_dim, EPS, self.qkv_TX.dtype
            )
            norm.slots()["q.weight"].fill(q_norm)
            norm.slots()["k.weight"].fill(k_norm)
            qk_THD.copy_(norm.forward(qk_THD))
        rotary = Rotary(RopeConfig(theta=10_000.0), self.head_dim, self.qkv_TX.dtype)
        rotate_in_place(qk_THD, *rotary.tables(self.positions_T))
        return qk_THD, x_THD[:, num_qk:]


SHAPES = [(9, 3, 64, 16), (4, 2, 128, 64), (7, 1, 128, 128), (2, 2, 64, 32), (32, 8, 128, 64)]


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(
    shape: tuple[int, int, int, int], with_norm: bool, device: torch.device, on_gpu: bool
) -> None:
    """float32 to rounding error, and not a byte beside q and the tokens' slots is written."""
    for num_tokens in (1, 5, 1500) if on_gpu else (1, 5):
        case = Case(shape, num_tokens, torch.float32, with_norm)
        qkv_TX, kv_B2KPD = case.run(device)
        expected_TX, expected_kv = case.reference()
        torch.testing.assert_close(qkv_TX, expected_TX, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(kv_B2KPD, expected_kv, rtol=1e-5, atol=2e-5, equal_nan=True)
        q_size = case.num_q_heads * case.head_dim
        assert torch.equal(qkv_TX[:, q_size:], case.qkv_TX[:, q_size:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rounds_like_the_cpu_model(
    dtype: torch.dtype, with_norm: bool, device: torch.device, on_gpu: bool
) -> None:
    """q, k and v agree with the worker's layers, nearly everywhere to the last bit."""
    if dtype == torch.bfloat16 and not on_gpu:
        pytest.skip("the interpreter truncates to bfloat16 where a GPU rounds")
    for shape in SHAPES[:2]:
        case = Case(shape, 1500 if on_gpu else 20, dtype, with_norm)
        qkv_TX, kv_B2KPD = case.run(device)
        q_THD = qkv_TX.unflatten(1, (-1, case.head_dim))[:, : case.num_q_heads]
        blocks, offsets = case.slots_T // case.block_size, case.slots_T % case.block_size
        qk_THD = torch.cat((q_THD, kv_B2KPD[blocks, 0, :, offsets]), dim=1)
        expected_THD, v_THD = case.cpu_model()
        assert torch.equal(kv_B2KPD[blocks, 1, :, offsets], v_THD)
        different = (qk_THD != expected_THD).float().mean()
        assert different < 0.02, f"{different:.2%} of the values round differently"
        torch.testing.assert_close(qk_THD, expected_THD, rtol=4e-2, atol=4e-2)
