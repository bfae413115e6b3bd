"""RMSNorm and SiLU * up against float32 references."""

import pytest
import torch

from cearx.kernels.norm import rms_norm, rms_norm_reference
from cearx.kernels.silu_mul import silu_mul, silu_mul_reference


def tolerance(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == torch.float32 else 4e-3


@pytest.fixture
def dtype(on_gpu: bool) -> torch.dtype:
    return torch.bfloat16 if on_gpu else torch.float32


@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (2, 577), (5, 1)], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_rms_norm(
    shape: tuple[int, int], in_place: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Any width, also into its own input."""
    torch.manual_seed(1)
    x = (torch.randn(shape, device=device) * 7).to(dtype)
    weight = torch.randn(shape[1], device=device).to(dtype)
    wanted = rms_norm_reference(x, weight, 1e-3)
    out = x if in_place else torch.full_like(x, torch.nan)
    rms_norm(x, weight, 1e-3, out)
    assert (out.float() - wanted).norm() <= tolerance(dtype) * wanted.norm()


def test_a_row_of_zeros_stays_zero(device: torch.device) -> None:
    """Eps keeps the division finite."""
    x = torch.zeros(2, 40, device=device)
    out = torch.full_like(x, torch.nan)
    rms_norm(x, torch.ones(40, device=device), 1e-6, out)
    assert not out.any()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy
@pytest.mark.parametrize("shape", [(1, 64), (3, 1025), (2, 2048), (7, 5)], ids=str)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Gate first, up second, and large gates neither overflow nor vanish."""
    torch.manual_seed(2)
    gate_up = (torch.randn(shape[0], 2 * shape[1], device=device) * 20).to(dtype)
    gate_up[0, :2] = torch.tensor([-200.0, 200.0])
    wanted = silu_mul_reference(gate_up)
    out = torch.full(shape, torch.nan, device=device, dtype=dtype)
    silu_mul(gate_up, out)
    assert (out.float() - wanted).norm() <= tolerance(dtype) * wanted.norm()
