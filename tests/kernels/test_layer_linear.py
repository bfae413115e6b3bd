"""The fused products against float32 references: odd sizes, every kernel, poisoned outputs."""

import pytest
import torch

from cearx.kernels import layer_linear
from cearx.kernels.gemv import GemvConfig
from cearx.kernels.layer_linear import (
    Choice,
    linear,
    linear_add,
    linear_add_reference,
    norm_gate_up,
    norm_gate_up_reference,
    norm_linear,
    norm_linear_reference,
    takes_rows,
)
from cearx.kernels.scaled_rows import MAX_SQUARES, NextNorm
from cearx.kernels.skinny_linear import SkinnyConfig, split_scratch

EPS = 1e-5
GEMV = GemvConfig(block_n=4, block_k=64, num_warps=1, ahead=1)
GEMV_AHEAD = GemvConfig(block_n=2, block_k=32, num_warps=2, ahead=3)
SKINNY = SkinnyConfig(block_n=16, block_k=32, num_warps=4, num_stages=3)
SPLIT = SkinnyConfig(block_n=32, block_k=16, num_warps=4, num_stages=2, split_k=3)
CASES: list[tuple[int, int, int, Choice]] = [
    (1, 48, 64, GEMV),
    (1, 45, 70, GEMV),
    (1, 33, 96, GEMV_AHEAD),
    (3, 17, 129, GEMV_AHEAD),
    (8, 13, 40, GEMV),
    (1, 64, 64, SKINNY),
    (5, 37, 70, SKINNY),
    (17, 50, 64, SKINNY),
    (2, 45, 113, SPLIT),
    (20, 33, 32, SPLIT),
    (1, 21, 40, None),
    (9, 21, 40, None),
]


@pytest.fixture(params=CASES, ids=str)
def case(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int, int, Choice]:
    """A size and the kernel that is made to run it."""
    chosen: tuple[int, int, int, Choice] = request.param
    monkeypatch.setattr(layer_linear, "choose", lambda *_: chosen[3])
    return chosen


@pytest.fixture
def dtype(on_gpu: bool) -> torch.dtype:
    """The interpreter's products are right in float32 only."""
    return torch.bfloat16 if on_gpu else torch.float32


def random(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1) -> torch.Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def poison(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Relative error; NaN anywhere fails."""
    limit = 1e-5 if got.dtype == torch.float32 else 8e-3
    error = ((got.float() - wanted).norm() / wanted.norm()).item()
    assert error < limit, f"relative error {error}"


@pytest.mark.parametrize("has_bias", [False, True])
def test_norm_linear(
    case: tuple[int, int, int, Choice], has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Norm, product and bias, whichever kernel runs them."""
    torch.manual_seed(1)
    tokens, outputs, inputs, _ = case
    x = random(tokens, inputs, dtype=dtype, device=device, scale=3)
    norm = random(inputs, dtype=dtype, device=device)
    weight = random(outputs, inputs, dtype=dtype, device=device)
    bias = random(outputs, dtype=dtype, device=device) if has_bias else None
    out = poison(tokens, outputs, like=x)
    norm_linear(x, norm, EPS, weight, bias, out, torch.full_like(x, torch.nan))
    check(out, norm_linear_reference(x, norm, EPS, weight, bias))


def test_norm_gate_up(
    case: tuple[int, int, int, Choice], dtype: torch.dtype, device: torch.device
) -> None:
    """Gate stands before up, only gate passes the SiLU; another product's split is not taken."""
    torch.manual_seed(2)
    tokens, width, inputs, _ = case
    x = random(tokens, inputs, dtype=dtype, device=device, scale=2)
    norm = random(inputs, dtype=dtype, device=device, scale=0.3)
    weight = random(2 * width, inputs, dtype=dtype, device=device)
    out, wide = poison(tokens, width, like=x), poison(tokens, 2 * width, like=x)
    norm_gate_up(x, norm, EPS, weight, out, torch.full_like(x, torch.nan), wide)
    check(out, norm_gate_up_reference(x, norm, EPS, weight))


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_add(
    case: tuple[int, int, int, Choice], has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """The residual grows in place, twice by two calls."""
    torch.manual_seed(3)
    tokens, outputs, inputs, _ = case
    x = random(tokens, inputs, dtype=dtype, device=device)
    weight = random(outputs, inputs, dtype=dtype, device=device)
    bias = random(outputs, dtype=dtype, device=device, scale=5) if has_bias else None
    residual = random(tokens, outputs, dtype=dtype, device=device, scale=4)
    wanted = linear_add_reference(x, weight, bias, residual)
    linear_add(x, weight, bias, residual)
    check(residual, wanted)
    linear_add(x, weight, bias, residual)
    check(residual, linear_add_reference(x, weight, bias, wanted))


def test_linear(
    case: tuple[int, int, int, Choice], dtype: torch.dtype, device: torch.device
) -> None:
    """A bare product."""
    torch.manual_seed(4)
    tokens, outputs, inputs, _ = case
    x = random(tokens, inputs, dtype=dtype, device=device)
    weight = random(outputs, inputs, dtype=dtype, device=device)
    out = poison(tokens, outputs, like=x)
    linear(x, weight, out)
    check(out, x.float() @ weight.float().t())


def test_counters_of_split_products_return_to_zero(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next split product starts as the first did."""
    monkeypatch.setattr(layer_linear, "choose", lambda *_: SPLIT)
    x = random(4, 100, dtype=dtype, device=device)
    weight = random(70, 100, dtype=dtype, device=device)
    outputs = [poison(4, 70, like=x) for _ in range(2)]
    for out in outputs:
        linear(x, weight, out)
    assert torch.equal(outputs[0], outputs[1])
    assert not split_scratch(x.device)[1].any()


@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize("behind", [SKINNY, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("tokens", "inputs", "width", "before"),
    [(1, 40, 33, GEMV), (8, 64, 70, GEMV_AHEAD), (5, 70, 37, SKINNY), (20, 33, 50, SPLIT)],
    ids=str,
)
def test_a_norm_between_two_products(
    tokens: int,
    inputs: int,
    width: int,
    before: Choice,
    behind: Choice,
    gated: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows that a product leaves make the next one as if a norm stood between them."""
    torch.manual_seed(5)
    outputs = 46
    monkeypatch.setattr(
        layer_linear,
        "choose",
        lambda _, num_outputs, __: before if num_outputs == width else behind,
    )
    x = random(tokens, inputs, dtype=dtype, device=device)
    weight = random(width, inputs, dtype=dtype, device=device)
    bias = random(width, dtype=dtype, device=device)
    norm = random(width, dtype=dtype, device=device, scale=2)
    next_weight = random(outputs, width, dtype=dtype, device=device)
    residual = random(tokens, width, dtype=dtype, device=device, scale=30)
    squares = torch.full((MAX_SQUARES,), torch.nan, device=device)
    next_norm = NextNorm(norm, EPS, torch.full_like(residual, torch.nan), squares)
    rows = linear_add(x, weight, bias, residual, next_norm)
    assert rows is not None
    poisoned = torch.full_like(residual, torch.nan)
    if not gated:
        out = poison(tokens, outputs, like=x)
        norm_linear(poisoned, norm, EPS, next_weight, None, out, poisoned, rows)
        check(out, norm_linear_reference(residual, norm, EPS, next_weight, None))
    elif takes_rows(tokens, next_weight, gated=True):
        out, wide = poison(tokens, outputs // 2, like=x), poison(tokens, outputs, like=x)
        norm_gate_up(poisoned, norm, EPS, next_weight, out, poisoned, wide, rows)
        check(out, norm_gate_up_reference(residual, norm, EPS, next_weight))
    else:
        assert behind is SPLIT


def test_rows_are_left_only_where_they_can_be_used(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """No rows for a norm in float16, whose range x * weight may leave, nor of too many tiles."""
    monkeypatch.setattr(layer_linear, "choose", lambda *_: SKINNY)
    assert takes_rows(4, torch.empty(8, 8, dtype=torch.bfloat16), gated=True)
    assert not takes_rows(4, torch.empty(8, 8, dtype=torch.float16), gated=True)
    monkeypatch.setattr(layer_linear, "choose", lambda *_: None)
    assert not takes_rows(4, torch.empty(8, 8), gated=False)
    monkeypatch.setattr(layer_linear, "choose", lambda *_: GEMV)
    width = (MAX_SQUARES // 16 + 1) * GEMV.block_n
    x, weight = torch.zeros(1, 8, device=device), torch.zeros(width, 8, device=device)
    residual = torch.ones(1, width, device=device)
    squares = torch.empty(MAX_SQUARES, device=device)
    next_norm = NextNorm(torch.ones(width, device=device), EPS, torch.empty_like(residual), squares)
    assert linear_add(x, weight, None, residual, next_norm) is None


def test_one_token_needs_no_table() -> None:
    """A model that nobody tuned has its one-token products in these kernels, the rest in cuBLAS."""
    assert isinstance(layer_linear.choose(1, 577, 1000), GemvConfig)
    assert layer_linear.choose(2, 577, 1000) is None
    assert layer_linear.choose(1000, 577, 1000) is None
