"""Compiled steps: as exact as the layers, blind to what stands beside a token."""

import pytest
import torch
from paged_steps import PagedSequence, PagedSteps
from tiny_models import FAMILIES, reference_logits, tiny_model
from torch import Tensor
from worker_models import kv_pool, worker_model

from cearx.worker.compiled_decoder import MAX_TOKENS
from cearx.worker.models.interface import LanguageModel

IDS = [(37 * index) % 298 + 3 for index in range(60)]
COUNTS = [20, 17, 20, 1, 1, 1]


def run(model: LanguageModel, family: str) -> Tensor:
    steps = PagedSteps(model, kv_pool(tiny_model(family), len(IDS), 16))
    sequence = PagedSequence(IDS)
    return torch.cat([steps.step([(sequence, count)])[0] for count in COUNTS])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_layers_and_compiled_steps_agree(
    family: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways are within float32 rounding of float64, also with more threads than cores."""
    torch.set_num_threads(num_threads)
    model = worker_model(tiny_model(family))
    exact = reference_logits(tiny_model(family), IDS)
    assert float((run(model, family) - exact).abs().max()) < 1e-4
    monkeypatch.setattr(model, "compiled", None)
    assert float((run(model, family) - exact).abs().max()) < 1e-4


@pytest.mark.parametrize("part", ["norms_LXE", "qkv_bias_LF", "head_norms_LXD"])
def test_a_lost_weight_shows(part: str) -> None:
    """Each array of weights reaches the result."""
    torch.set_num_threads(2)
    family = "qwen3" if part == "head_norms_LXD" else "qwen2"
    model = worker_model(tiny_model(family))
    before = run(model, family)
    weights = getattr(model.compiled._weights, part)
    weights[1] = 0.5 * weights[1] + 0.1
    assert float((run(model, family) - before).abs().max()) > 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_token_does_not_depend_on_its_step(family: str) -> None:
    """In any compiled steps, and beside other requests, logits have the same bits."""
    torch.set_num_threads(2)
    model = worker_model(tiny_model(family))
    steps = PagedSteps(model, kv_pool(tiny_model(family), 200, 16))
    whole = steps.step([(PagedSequence(IDS), len(IDS))])[0]
    assert torch.equal(run(model, family), whole)
    other = PagedSequence(IDS[7:])
    together = PagedSequence(IDS)
    logits: list[Tensor] = []
    for count in (30, 29, 1):
        beside = min(count, MAX_TOKENS - count, 3)
        logits.append(steps.step([(together, count), (other, beside)])[0])
    assert torch.equal(torch.cat(logits), whole)


def test_other_layers_are_not_compiled() -> None:
    """A layer that may compute something else, and other types, take the layers' own way."""
    reference = tiny_model("llama")
    assert worker_model(reference).compiled is not None
    assert worker_model(reference, torch.bfloat16).compiled is None
    model = worker_model(reference)
    model.compiled_layers = ()
    assert model.compiled is None
