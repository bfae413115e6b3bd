"""The default model against transformers: the same logits and the same 64 greedy tokens."""

from copy import deepcopy

import pytest
import torch
from paged_steps import PagedSequence, PagedSteps
from transformers import LlamaConfig, LlamaForCausalLM

from cearx.core.config import WorkerConfig
from cearx.core.gguf_file import GGUFFile
from cearx.core.model_source import resolve
from cearx.worker.gguf_loader import GGUFWeights
from cearx.worker.kv_cache import KVCache
from cearx.worker.model_loader import LoadedModel, load_model

pytestmark = pytest.mark.model
NUM_OUTPUT = 64
CHAT = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407),
    *(19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 16374, 281, 827),
    *(8545, 1701, 357, 5939, 30, 2, 198, 1, 520, 9531, 198, 504, 3575, 282, 4649, 314, 7042, 30),
    *(657, 314, 260, 8952, 282, 260, 1693, 28, 284, 253, 8560, 282, 984, 28, 7317, 284, 2092, 30),
    *(2, 198),
]
"""System prompt, a question about the capital of France and its answer."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(resolve(None, lambda *_: None), WorkerConfig(), lambda *_: None)


@pytest.fixture(scope="module")
def reference(loaded: LoadedModel) -> LlamaForCausalLM:
    """The same weights in transformers' own Llama."""
    config = loaded.config
    weights = GGUFWeights(GGUFFile(resolve(None, lambda *_: None).path))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=True,
        )
    ).eval()
    tensors = {name: weights.get(name) for name in weights.names()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return model


def prompt(length: int) -> list[int]:
    """Token ids all over the vocabulary."""
    return [(7919 * i + 31 * length) % 49_000 + 20 for i in range(length)]


@torch.no_grad()
def test_logits(loaded: LoadedModel, reference: LlamaForCausalLM) -> None:
    """A chat's logits are about as near to float64 as the reference's own: 1e-4 beside 37."""
    theirs = reference(torch.tensor([CHAT])).logits[0]
    exact = deepcopy(reference).double()(torch.tensor([CHAT])).logits[0]
    their_error = float((theirs - exact).square().mean().sqrt())
    for counts in ([len(CHAT)], [16, 16, 16, 16, 8], [1] * len(CHAT)):
        steps = PagedSteps(loaded.model, KVCache(loaded.config, 8, 16, loaded.dtype))
        sequence = PagedSequence(CHAT)
        ours = torch.cat([steps.step([(sequence, count)])[0] for count in counts])
        assert float((ours - exact).square().mean().sqrt()) < 2 * their_error
        torch.testing.assert_close(ours, exact.float(), atol=1.5e-4, rtol=0)
        # Each rounds in its own way: against each other the two errors add up.
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


def test_greedy_tokens_in_a_batch(loaded: LoadedModel, reference: LlamaForCausalLM) -> None:
    """Four prompts of mixed lengths in chunks of 16 beside decodes give the reference's tokens."""
    prompts = [prompt(length) for length in (3, 16, 33, 70)]
    steps = PagedSteps(loaded.model, KVCache(loaded.config, 48, 16, loaded.dtype))
    sequences = [PagedSequence(list(ids)) for ids in prompts]
    while running := [
        s
        for s, ids in zip(sequences, prompts, strict=True)
        if len(s.token_ids) < len(ids) + NUM_OUTPUT
    ]:
        rows = [(s, min(16, s.num_left)) for s in running]
        rows.sort(key=lambda row: row[1] != 1)
        for (sequence, _), logits in zip(rows, steps.step(rows), strict=True):
            if not sequence.num_left:
                sequence.token_ids.append(int(logits[-1].argmax()))
    for sequence, ids in zip(sequences, prompts, strict=True):
        # The reference's greedy continuation is this one if each token is its choice in turn.
        with torch.no_grad():
            theirs = reference(torch.tensor([sequence.token_ids[:-1]])).logits[0]
        assert sequence.token_ids[len(ids) :] == theirs[len(ids) - 1 :].argmax(-1).tolist()
