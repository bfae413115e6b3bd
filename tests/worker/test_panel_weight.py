"""Quantised panels against the GGUF package's floats, and what a row's result may depend on."""

import threading

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import silu

from cearx.kernels.panel_product import exp
from cearx.worker.gguf_blocks import DECODERS
from cearx.worker.panel_weight import PanelWeight
from cearx.worker.thread_team import ThreadTeam

BLOCK_BYTES = {kind: gguf.GGML_QUANT_SIZES[kind][1] for kind in DECODERS}
KINDS = sorted(DECODERS)


@pytest.fixture(autouse=True, params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


def random_blocks(kind: Kind, num_rows: int, in_features: int) -> NDArray[np.uint8]:
    """Any codes; scales and offsets between 2^-10 and 2^-6 of either sign."""
    generator = np.random.default_rng(num_rows + in_features)
    count = num_rows * in_features // 32
    blocks = generator.integers(0, 256, (count, BLOCK_BYTES[kind]), np.uint8)
    halfs = 2 if kind == Kind.Q4_1 else 1
    values = generator.uniform(2.0**-10, 2.0**-6, (count, halfs)).astype("<f2")
    values *= generator.choice([-1, 1], (count, halfs)).astype("<f2")
    blocks[:, : 2 * halfs] = values.view(np.uint8)
    return blocks


def quantised(kind: Kind, num_rows: int, in_features: int) -> tuple[PanelWeight, Tensor]:
    """A weight and the floats that the GGUF package makes of the same blocks."""
    blocks = random_blocks(kind, num_rows, in_features)
    values = gguf.quants.dequantize(blocks.reshape(1, -1), kind).reshape(num_rows, in_features)
    weight = PanelWeight(num_rows, in_features)
    weight.store_quantised(0, DECODERS[kind](blocks, (num_rows, in_features)))
    return weight, torch.from_numpy(values)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 16, 63, 129])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (45, 32), (7, 576)])
def test_quantised_product(kind: Kind, num_rows: int, out_features: int, in_features: int) -> None:
    """Products are as near to float64 as float32 sums are, look-ups are equal bit for bit."""
    torch.manual_seed(num_rows)
    weight, values = quantised(kind, out_features, in_features)
    x = torch.randn(num_rows, in_features)
    exact = x.double() @ values.double().T
    scale = (x.double().abs() @ values.double().abs().T).max()
    assert float((weight.product(x) - exact).abs().max() / scale) < 2e-7
    assert torch.equal(weight.columns(torch.arange(out_features)), values)


@pytest.mark.parametrize("kinds", [(Kind.Q4_1, Kind.Q8_0), (Kind.Q8_0, None), (None, Kind.Q4_0)])
def test_parts_of_different_kinds(kinds: tuple[Kind | None, Kind | None]) -> None:
    """Gate and up may come in different kinds, each panel is read as its own."""
    torch.manual_seed(0)
    weight, halves = PanelWeight(140, 64), []
    for part, kind in enumerate(kinds):
        values = torch.randn(70, 64) * 0.1
        if kind is None:
            weight.store_rows(70 * part, values)
        else:
            blocks = random_blocks(kind, 70, 64)
            floats = gguf.quants.dequantize(blocks.reshape(1, -1), kind).reshape(70, 64)
            values = torch.from_numpy(floats)
            weight.store_quantised(70 * part, DECODERS[kind](blocks, (70, 64)))
        halves.append(values)
    weight.store_bias(0, torch.randn(140))
    x = torch.randn(5, 64)
    gate, up = (
        x @ values.T + weight.bias_N[70 * part : 70 * part + 70]
        for part, values in enumerate(halves)
    )
    torch.testing.assert_close(weight.gated_product(x), silu(gate) * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, None])
def test_a_row_does_not_depend_on_its_batch(kind: Kind | None) -> None:
    """Alone, in a batch of any size and at any place, a row's result has the same bits."""
    torch.manual_seed(0)
    if kind is None:
        weight = PanelWeight(80, 96)
        weight.store_rows(0, torch.randn(80, 96))
    else:
        weight, _ = quantised(kind, 80, 96)
    x = torch.randn(150, 96)
    whole = weight.product(x)
    for size in (1, 2, 3, 8, 9, 17, 64):
        first = 150 - size
        assert torch.equal(weight.product(x[first:]), whole[first:]), size


def test_nan_stays_in_its_row() -> None:
    """A row of NaN poisons no other row, and memory beside the result stays as it was."""
    weight, _ = quantised(Kind.Q4_1, 45, 64)
    x = torch.randn(9, 64)
    x[4] = torch.nan
    result = weight.product(x)
    assert bool(result[4].isnan().all())
    assert not bool(result[torch.arange(9) != 4].isnan().any())


def test_missing_rows_are_named() -> None:
    """A weight of which a part was never stored cannot be used."""
    weight = PanelWeight(64, 32)
    weight.store_rows(0, torch.zeros(32, 32))
    with pytest.raises(AssertionError, match="rows from 32 on were never stored"):
        weight.panels()


def test_exp_is_within_one_unit() -> None:
    """The compiled exponential against float64, over all that a float32 result can hold."""
    x = np.linspace(-87, 88, 20001, dtype=np.float32)
    found = np.array([exp(value) for value in x])
    assert np.abs(found / np.exp(x.astype(np.float64)) - 1).max() < 1.2e-7
    assert exp(np.float32(-np.inf)) < 1.7e-38


def test_a_helpers_error_reaches_the_caller() -> None:
    """What one thread raises, the caller gets, and the team works on."""
    team = ThreadTeam(3)
    seen: set[int] = set()

    def fails(index: int, num_threads: int, counters: int, scratch: object) -> None:
        seen.add(index)
        assert num_threads == 3
        if index == 2:
            raise ValueError("from a helper")

    with pytest.raises(ValueError, match="from a helper"):
        team.run(fails)
    assert seen == {0, 1, 2}
    team.run(lambda index, *_: seen.discard(index))
    assert not seen


def test_a_busy_team_is_not_waited_for() -> None:
    """A second caller computes alone: one thread, counters of its own."""
    team = ThreadTeam(2)
    inside, leave = threading.Event(), threading.Event()

    def blocks(index: int, *_: object) -> None:
        inside.set()
        assert leave.wait(60)

    caller = threading.Thread(target=team.run, args=(blocks,))
    caller.start()
    assert inside.wait(60)
    sizes: list[int] = []
    team.run(lambda _, num_threads, *__: sizes.append(num_threads))
    leave.set()
    caller.join()
    assert sizes == [1]
