"""Seeded sampling on the default model: the seed decides, not the batch."""

from collections.abc import Callable

import pytest
import torch
from local_engine import LocalEngine

from cearx.core.config import WorkerConfig
from cearx.core.messages import SamplingParams
from cearx.core.model_source import resolve
from cearx.worker.model_loader import load_model

PROMPTS = [[504, 3575, 282, 4649, 314], [9906], [1, 2, 3, 4, 5, 6, 7, 8, 9], [28, 450, 216] * 11]
SEEDS = [2**64 - 1, 0, 7, 2**40 + 3]

MakeEngine = Callable[..., LocalEngine]


@pytest.fixture(scope="module")
def engine() -> MakeEngine:
    """Makes engines of the default model, which is loaded once."""
    torch.set_num_threads(1)
    loaded = load_model(resolve(None, lambda *_: None), WorkerConfig(), lambda *_: None)
    return lambda **flags: LocalEngine(loaded.model, loaded.config, **flags)


@pytest.mark.model
def test_plain_seeded_tokens_are_equal_however_they_are_computed(engine: MakeEngine) -> None:
    """Temperature 1, no filters, 48 tokens: alone, in a batch of 16, in chunks of 16 tokens, and
    after preemption."""
    prompts = PROMPTS * len(SEEDS)
    rules = [SamplingParams(seed=seed) for seed in SEEDS for _ in PROMPTS]
    together = engine().generate(prompts, 48, rules)
    assert len({tuple(tokens) for tokens in together}) == 16
    for i in (0, 5, 10, 15):  # every prompt and every seed once
        assert engine().generate([prompts[i]], 48, rules[i]) == [together[i]]
    assert engine(budget=16).generate(prompts, 48, rules) == together
    short = engine(num_blocks=220, block_size=2, caching=False, admission="greedy")
    assert short.generate(prompts, 48, rules) == together
    assert short.num_preemptions > 0


@pytest.mark.model
def test_filtered_seeded_tokens_are_equal_however_they_are_computed(engine: MakeEngine) -> None:
    """16 tokens of each prompt, with a filter and a penalty."""
    rule = SamplingParams(seed=0, temperature=0.7, top_p=0.9, repetition_penalty=1.1)
    together = engine().generate(PROMPTS, 16, rule)
    assert [engine().generate([prompt], 16, rule)[0] for prompt in PROMPTS] == together
    assert engine(budget=16).generate(PROMPTS, 16, rule) == together
    short = engine(num_blocks=30, block_size=2, caching=False, admission="greedy")
    assert short.generate(PROMPTS, 16, rule) == together
    assert short.num_preemptions > 0
    assert len({tuple(tokens) for tokens in together}) == len(PROMPTS)
