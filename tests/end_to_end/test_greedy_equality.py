"""Scheduler and worker together give transformers' tokens, however the work was cut up."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from local_engine import LocalEngine
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from worker_models import worker_config, worker_model

from cearx.core.config import WorkerConfig
from cearx.core.model_source import resolve
from cearx.worker.model_config import ModelConfig
from cearx.worker.model_loader import load_model
from cearx.worker.models.interface import LanguageModel

NUM_TOKENS = 64
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 50, 5, 64, 70, 3, 90, 48, 100]
TIE = 1e-4
"""Least difference of the two best logits that counts as a decision."""
TINY = ["llama", "llama-bias", "qwen2", "qwen3"]


def reference_tokens(
    model: PreTrainedModel, prompt: list[int], count: int
) -> tuple[list[int], float]:
    """Greedy tokens of a prompt alone by transformers, and the least margin of a choice.

    A margin within rounding is a tie, which any order of summation may break either way.
    """
    model.generation_config.eos_token_id = None  # as ignore_eos: it may be sampled, and goes on
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best_T2 = torch.cat(output.logits).topk(2).values
    margin = float((best_T2[:, 0] - best_T2[:, 1]).min())
    return [int(token) for token in output.sequences[0, len(prompt) :]], margin


def decided_prompts(
    model: PreTrainedModel, lengths: list[int], count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """A random prompt of each length whose greedy tokens are no ties, and those tokens."""
    generator = torch.Generator().manual_seed(7)
    prompts, expected = [], []
    for length in lengths:
        margin = 0.0
        while margin < TIE:
            high = model.config.vocab_size
            prompt = torch.randint(3, high, (length,), generator=generator).tolist()
            tokens, margin = reference_tokens(model, prompt, count)
        prompts.append(prompt)
        expected.append(tokens)
    return prompts, expected


def check_every_way(
    engine: Callable[..., LocalEngine],
    prompts: list[list[int]],
    expected: list[list[int]],
    num_blocks_short: int,
) -> None:
    """Alone, in a mixed batch, in chunks of 16 tokens, after a prefix hit, after a preemption."""
    count = len(expected[0])
    for prompt, tokens in list(zip(prompts, expected, strict=True))[:3]:
        assert engine().generate([prompt], count) == [tokens], "alone"

    assert engine().generate(prompts, count) == expected, "in a batch"

    chunked = engine(budget=16)
    assert chunked.generate(prompts, count) == expected, "in chunks"
    assert chunked.num_chunks > 2 * len(prompts)

    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    alone = engine(budget=16).generate([prompts[longest]], count)  # some steps sample nothing
    assert alone == [expected[longest]], "in chunks, alone"

    cached = engine()
    cached.generate(prompts, 1)
    before = cached.num_cached_tokens
    assert cached.generate(prompts, count) == expected, "after a prefix hit"
    assert cached.num_cached_tokens > before

    short = engine(num_blocks=num_blocks_short, caching=False, admission="greedy")
    assert short.generate(prompts, count) == expected, "after preemptions"
    assert short.num_preemptions > 0


@pytest.mark.parametrize("family", TINY)
def test_tiny_models(family: str) -> None:
    """64 greedy tokens of each family, for 16 prompts of mixed lengths."""
    torch.set_num_threads(1)
    reference = tiny_model(family)
    config = worker_config(reference)
    model = worker_model(reference)
    prompts, expected = decided_prompts(reference, LENGTHS, NUM_TOKENS)
    check_every_way(lambda **flags: LocalEngine(model, config, **flags), prompts, expected, 30)


@pytest.fixture(scope="module")
def smollm2() -> tuple[PreTrainedModel, LanguageModel, ModelConfig]:
    """The default model, by transformers' own GGUF reader and by ours."""
    files = resolve(None, lambda *_: None)
    loaded = load_model(files, WorkerConfig(), lambda *_: None)
    reference = AutoModelForCausalLM.from_pretrained(
        str(Path(files.path).parent), gguf_file=files.path.name, dtype=torch.float32
    )
    return reference.eval(), loaded.model, loaded.config


@pytest.mark.model
def test_the_default_model(smollm2: tuple[PreTrainedModel, LanguageModel, ModelConfig]) -> None:
    """64 greedy tokens of SmolLM2, for 16 prompts of mixed lengths."""
    reference, model, config = smollm2
    prompts, expected = decided_prompts(reference, LENGTHS, NUM_TOKENS)
    check_every_way(lambda **flags: LocalEngine(model, config, **flags), prompts, expected, 30)
