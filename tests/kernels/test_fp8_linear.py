"""Products with 8-bit weights: each kernel against float32 and the same rounded weights."""

from dataclasses import replace

import pytest
import torch

from cearx.kernels import layer_linear
from cearx.kernels.fp8_weight import FP8, MAX_VALUE, Fp8Weight
from cearx.kernels.gemv import GemvConfig
from cearx.kernels.layer_linear import (
    Choice,
    choose_fp8,
    linear_add,
    linear_add_reference,
    norm_gate_up,
    norm_gate_up_reference,
    norm_linear,
    norm_linear_reference,
    takes_rows,
)
from cearx.kernels.linear_table import FP8_TABLE
from cearx.kernels.norm import rms_norm_reference
from cearx.kernels.scaled_product import RoundedRows, can_run, round_rows
from cearx.kernels.scaled_rows import MAX_SQUARES, NextNorm
from cearx.kernels.skinny_linear import MAX_TOKENS, SkinnyConfig

EPS = 1e-5
GEMV = GemvConfig(block_n=4, block_k=64, num_warps=1, ahead=1)
SKINNY = SkinnyConfig(block_n=16, block_k=32, num_warps=4, num_stages=3)
SPLIT = SkinnyConfig(block_n=32, block_k=16, num_warps=4, num_stages=2, split_k=3)
CASES: list[tuple[int, int, int, Choice]] = [
    (1, 48, 64, GEMV),
    (3, 45, 70, GEMV),
    (1, 64, 64, SKINNY),
    (17, 37, 70, SKINNY),
    (MAX_TOKENS + 5, 20, 40, SKINNY),
    (2, 45, 113, SPLIT),
    (20, 33, 32, SPLIT),
]


@pytest.fixture(params=CASES, ids=str)
def case(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int, int, Choice]:
    """A size and the kernel that is made to run it."""
    chosen: tuple[int, int, int, Choice] = request.param
    monkeypatch.setattr(layer_linear, "choose_fp8", lambda *_: chosen[3])
    return chosen


@pytest.fixture
def dtype(on_gpu: bool) -> torch.dtype:
    """The interpreter's products are right in float32 only."""
    return torch.bfloat16 if on_gpu else torch.float32


def random(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1) -> torch.Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def row_sizes(num_outputs: int, device: torch.device) -> torch.Tensor:
    """Very different ones, so that a wrong scale shows."""
    return torch.logspace(-2, 1, num_outputs, device=device)


def rounded(num_outputs: int, num_inputs: int, device: torch.device) -> Fp8Weight:
    """Random weights with rows of those sizes."""
    weight = Fp8Weight.empty(num_outputs, num_inputs, torch.bfloat16, device)
    rows = torch.randn(num_outputs, num_inputs, device=device)
    weight.store(rows * row_sizes(num_outputs, device)[:, None])
    return weight


def gate_and_up(width: int, num_inputs: int, device: torch.device) -> Fp8Weight:
    """Gates of one size, as SiLU is not linear, over ups of those sizes."""
    weight = rounded(2 * width, num_inputs, device)
    weight.rows(0, width).store(torch.randn(width, num_inputs, device=device) / 4)
    weight.rows(width, width).store(rounded(width, num_inputs, device).exact())
    return weight


def check(got: torch.Tensor, wanted: torch.Tensor, limit: float | None = None) -> None:
    """Relative error, where every output counts as if its weights were of the same size."""
    limit = limit or (1e-5 if got.dtype == torch.float32 else 8e-3)
    sizes_N = row_sizes(wanted.shape[1], wanted.device)
    error = float(((got.float() - wanted) / sizes_N).norm() / (wanted / sizes_N).norm())
    assert error < limit, f"relative error {error}"


@pytest.mark.parametrize("has_bias", [False, True])
def test_norm_linear(
    case: tuple[int, int, int, Choice], has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Norm, product, scale and then bias, whichever kernel runs them."""
    torch.manual_seed(1)
    tokens, outputs, inputs, _ = case
    x = random(tokens, inputs, dtype=dtype, device=device, scale=3)
    norm = random(inputs, dtype=dtype, device=device)
    weight = rounded(outputs, inputs, device)
    bias = row_sizes(outputs, device).to(dtype) if has_bias else None
    out = torch.full((tokens, outputs), torch.nan, dtype=dtype, device=device)
    norm_linear(x, norm, EPS, weight, bias, out, torch.full_like(x, torch.nan))
    check(out, norm_linear_reference(x, norm, EPS, weight, bias))


def test_norm_gate_up(
    case: tuple[int, int, int, Choice], dtype: torch.dtype, device: torch.device
) -> None:
    """Gate and up have scales of their own, which come before the SiLU; no split is taken."""
    torch.manual_seed(2)
    tokens, width, inputs, _ = case
    x = random(tokens, inputs, dtype=dtype, device=device, scale=2)
    norm = random(inputs, dtype=dtype, device=device, scale=0.3)
    weight = gate_and_up(width, inputs, device)
    out = torch.full((tokens, width), torch.nan, dtype=dtype, device=device)
    wide = torch.full((tokens, 2 * width), torch.nan, dtype=dtype, device=device)
    norm_gate_up(x, norm, EPS, weight, out, torch.full_like(x, torch.nan), wide)
    check(out, norm_gate_up_reference(x, norm, EPS, weight))


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_add(
    case: tuple[int, int, int, Choice], has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """The scale is the product's alone, not the bias's and not the residual's."""
    torch.manual_seed(3)
    tokens, outputs, inputs, _ = case
    x = random(tokens, inputs, dtype=dtype, device=device)
    weight = rounded(outputs, inputs, device)
    sizes = row_sizes(outputs, device).to(dtype)
    bias = 5 * sizes if has_bias else None
    residual = random(tokens, outputs, dtype=dtype, device=device, scale=4) * sizes
    wanted = linear_add_reference(x, weight, bias, residual)
    linear_add(x, weight, bias, residual)
    check(residual, wanted)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("tokens", "before"), [(1, GEMV), (5, SKINNY), (20, SPLIT)], ids=str)
def test_a_norm_between_two_products(
    tokens: int,
    before: Choice,
    gated: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product leaves rows for the next as with 16-bit weights; the next one's split is dropped
    where SiLU follows."""
    torch.manual_seed(7)
    inputs, width, outputs = 40, 33, 46
    monkeypatch.setattr(
        layer_linear, "choose_fp8", lambda _, n, *__: before if n == width else SPLIT
    )
    weight, following = rounded(width, inputs, device), rounded(outputs, width, device)
    if gated:
        following = gate_and_up(outputs // 2, width, device)
    weight = replace(weight, dtype=dtype)
    following = replace(following, dtype=dtype)
    x = random(tokens, inputs, dtype=dtype, device=device)
    norm = random(width, dtype=dtype, device=device, scale=2)
    residual = random(tokens, width, dtype=dtype, device=device, scale=30)
    squares = torch.full((MAX_SQUARES,), torch.nan, device=device)
    next_norm = NextNorm(norm, EPS, torch.full_like(residual, torch.nan), squares)
    assert takes_rows(tokens, following, gated=gated)
    assert not takes_rows(MAX_TOKENS + 1, following, gated=gated)
    rows = linear_add(x, weight, None, residual, next_norm)
    assert rows is not None
    poisoned = torch.full_like(residual, torch.nan)
    if gated:
        out = torch.full((tokens, outputs // 2), torch.nan, dtype=dtype, device=device)
        wide = torch.full((tokens, outputs), torch.nan, dtype=dtype, device=device)
        norm_gate_up(poisoned, norm, EPS, following, out, poisoned, wide, rows)
        check(out, norm_gate_up_reference(residual, norm, EPS, following))
    else:
        out = torch.full((tokens, outputs), torch.nan, dtype=dtype, device=device)
        norm_linear(poisoned, norm, EPS, following, None, out, poisoned, rows)
        check(out, norm_linear_reference(residual, norm, EPS, following, None))


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_library_products_round_the_activations(
    tokens: int, has_bias: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three operations by the library, whose only error is that of 8-bit activations."""
    torch.manual_seed(4)
    monkeypatch.setattr(layer_linear, "choose_fp8", lambda *_: None)
    outputs, inputs = 64, 96
    weight = rounded(outputs, inputs, device)
    random_bf16 = {"dtype": torch.bfloat16, "device": device}
    x, norm = random(tokens, inputs, **random_bf16, scale=3), random(inputs, **random_bf16)
    sizes = row_sizes(outputs, device).bfloat16()
    bias = sizes if has_bias else None
    rows = RoundedRows.allocate(tokens + 3, inputs, outputs, torch.bfloat16, device)
    out = torch.full((tokens, outputs), torch.nan, **random_bf16)
    limit = 0.04  # an e4m3 number is at most 1/16 from what it stands for
    norm_linear(x, norm, EPS, weight, bias, out, torch.full_like(x, torch.nan), None, rows)
    check(out, norm_linear_reference(x, norm, EPS, weight, bias), limit)
    residual = random(tokens, outputs, **random_bf16) * sizes
    wanted = linear_add_reference(x, weight, bias, residual)
    linear_add(x, weight, bias, residual, None, rows)
    check(residual, wanted, limit)
    weight = gate_and_up(outputs // 2, inputs, device)
    gated = torch.full((tokens, outputs // 2), torch.nan, **random_bf16)
    norm_gate_up(x, norm, EPS, weight, gated, torch.full_like(x, torch.nan), out, None, rows)
    check(gated, norm_gate_up_reference(x, norm, EPS, weight), 2 * limit)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("has_norm", [False, True])
def test_rounded_rows(has_norm: bool, device: torch.device) -> None:
    """Each token has its own scale, its largest value is 448, zeros stay zeros, NaN is not lost."""
    torch.manual_seed(5)
    x = torch.randn(6, 77, device=device) * torch.logspace(-4, 4, 6, device=device)[:, None]
    x[2] = 0
    x[4, 3] = torch.inf if has_norm else torch.nan
    norm = torch.rand(77, device=device) + 0.5
    rows = RoundedRows.allocate(8, 80, 1, torch.float32, device)
    values = round_rows(x, rows, norm if has_norm else None, EPS)
    wanted = rms_norm_reference(x, norm, EPS) if has_norm else x
    good = [0, 1, 3, 5]
    assert values.dtype == FP8 and bool((values[good].float().abs().amax(1) == MAX_VALUE).all())
    exact = (values.float() * rows.scale_T1[:6])[good]
    largest = wanted[good].abs().amax(1, keepdim=True)
    assert bool(((exact - wanted[good]).abs() <= wanted[good].abs() / 16 + largest / 2**18).all())
    assert not values[2].float().any()
    assert bool(values[4].float().isnan().any())


def test_rounding_of_weights(device: torch.device) -> None:
    """Half a step at most in every row, whatever its size; zero rows stay; NaN is refused."""
    torch.manual_seed(6)
    exact = torch.randn(5, 99, device=device)
    exact *= torch.tensor([1e-30, 1e-3, 0, 1, 1e30], device=device)[:, None]
    weight = Fp8Weight.empty(5, 99, torch.float32, device)
    weight.rows(1, 3).store(exact[1:4].bfloat16())
    assert torch.equal(weight.rows(1, 3).exact(), weight.exact()[1:4])
    weight.store(exact)
    largest = exact.abs().amax(1, keepdim=True)
    error = (weight.exact() - exact).abs()
    assert bool((error <= exact.abs() / 16 + largest / MAX_VALUE / 2**10).all())
    assert bool((weight.exact().abs().amax(1) == largest[:, 0]).float().mean() > 0.5)
    exact[2, 7] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        weight.store(exact)


def test_a_kernel_for_every_size() -> None:
    """One token, few and many, of sizes that the library takes and of others."""
    bf16 = torch.bfloat16
    assert isinstance(choose_fp8(1, 577, 1000, bf16), GemvConfig)
    assert isinstance(choose_fp8(64, 4096, 4096, bf16), SkinnyConfig)
    assert choose_fp8(65, 4096, 4096, bf16) is None
    assert isinstance(choose_fp8(5000, 4096, 4096, torch.float16), SkinnyConfig)
    assert isinstance(choose_fp8(5000, 4096, 1000, bf16), SkinnyConfig)
    assert can_run(4096, 4096, bf16) and not can_run(4096, 4100, bf16)
    for tokens, choice in ((key[0], choice) for key, choice in FP8_TABLE.items()):
        assert choice is not None or tokens > 1
    few = choose_fp8(8, 1024, 3072, bf16)
    assert isinstance(few, SkinnyConfig) and few.split_k == 6
