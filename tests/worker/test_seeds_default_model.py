"""Seeded sampling on the default model: the seed decides, not the batch."""

import pytest
import torch
from local_engine import LocalEngine

from cearx.core.config import WorkerConfig
from cearx.core.messages import SamplingParams
from cearx.core.model_source import resolve
from cearx.worker.model_loader import load_model

PROMPTS = [[504, 3575, 282, 4649, 314], [9906], [1, 2, 3, 4, 5, 6, 7, 8, 9], [28, 450, 216] * 11]
RULES = [
    SamplingParams(seed=2**64 - 1),
    SamplingParams(seed=0, temperature=0.7, top_p=0.9, repetition_penalty=1.1),
]


@pytest.mark.model
@pytest.mark.parametrize("rule", RULES, ids=["plain", "filtered"])
def test_seeded_tokens_alone_in_a_batch_in_chunks_and_after_preemption(
    rule: SamplingParams,
) -> None:
    """16 random tokens of each prompt are the same in every way of computing them."""
    torch.set_num_threads(1)
    loaded = load_model(resolve(None, lambda *_: None), WorkerConfig(), lambda *_: None)

    def engine(**flags: int) -> LocalEngine:
        return LocalEngine(loaded.model, loaded.config, **flags)

    together = engine().generate(PROMPTS, 16, rule)
    assert [engine().generate([prompt], 16, rule)[0] for prompt in PROMPTS] == together
    assert engine(budget=16).generate(PROMPTS, 16, rule) == together
    short = engine(num_blocks=30, block_size=2, caching=False)
    assert short.generate(PROMPTS, 16, rule) == together
    assert short.num_preemptions > 0
    assert len({tuple(tokens) for tokens in together}) == len(PROMPTS)
