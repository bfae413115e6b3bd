"""The default model against transformers: the same logits and the same 64 greedy tokens."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import MethodType

import pytest
import torch
from paged_steps import PagedSequence, PagedSteps
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

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


@dataclass(frozen=True, eq=False)
class ChatLogits:
    theirs_TV: Tensor
    exact_TV: Tensor


@pytest.fixture(scope="module")
def chat_logits(reference: LlamaForCausalLM) -> ChatLogits:
    """The chat's logits as transformers gives them in float32, and in float64 throughout."""
    exact = deepcopy(reference).double()
    for module in exact.modules():
        if isinstance(module, LlamaRMSNorm):  # their own rounds to float32 whatever the type
            module.forward = MethodType(_norm_in_float64, module)  # type: ignore[method-assign]
    ids_BT = torch.tensor([CHAT])
    with torch.no_grad():
        return ChatLogits(reference(ids_BT).logits[0], exact(ids_BT).logits[0])


def _norm_in_float64(norm: LlamaRMSNorm, x: Tensor) -> Tensor:
    mean_square = x.square().mean(-1, keepdim=True)
    return norm.weight * (x / (mean_square + norm.variance_epsilon).sqrt())


def in_chunks(loaded: LoadedModel, size: int) -> list[Tensor]:
    steps = PagedSteps(loaded.model, KVCache(loaded.config, 8, 16, loaded.dtype))
    sequence = PagedSequence(CHAT)
    parts: list[Tensor] = []
    while sequence.num_left:
        parts += steps.step([(sequence, min(size, sequence.num_left))])
    return [torch.cat(parts)]


def after_a_prefix_hit(loaded: LoadedModel) -> list[Tensor]:
    """The second request computes only what follows the first one's two whole blocks."""
    steps = PagedSteps(loaded.model, KVCache(loaded.config, 16, 16, loaded.dtype))
    first = PagedSequence(CHAT[:40])
    before = steps.step([(first, 40)])[0][:32]
    second = PagedSequence(CHAT, 32, first.blocks[:2])
    return [torch.cat((before, *steps.step([(second, len(CHAT) - 32)])))]


def in_a_batch(loaded: LoadedModel) -> list[Tensor]:
    """16 requests, the chat's first 12 to 72 tokens, of at most 16 tokens a step each."""
    steps = PagedSteps(loaded.model, KVCache(loaded.config, 80, 16, loaded.dtype))
    sequences = [PagedSequence(CHAT[: len(CHAT) - 4 * index]) for index in range(16)]
    parts: list[list[Tensor]] = [[] for _ in sequences]
    while running := [index for index in range(16) if sequences[index].num_left]:
        counts = [(index, min(1 + index, sequences[index].num_left)) for index in running]
        counts.sort(key=lambda count: count[1] != 1)
        rows = [(sequences[index], count) for index, count in counts]
        for (index, _), logits in zip(counts, steps.step(rows), strict=True):
            parts[index].append(logits)
    return [torch.cat(of_one) for of_one in parts]


WAYS: dict[str, Callable[[LoadedModel], list[Tensor]]] = {
    "one chunk": partial(in_chunks, size=len(CHAT)),
    "token by token": partial(in_chunks, size=1),
    "chunks of 16": partial(in_chunks, size=16),
    "prefix hit": after_a_prefix_hit,
    "batch of 16": in_a_batch,
}


@pytest.mark.parametrize("way", WAYS)
def test_logits(loaded: LoadedModel, chat_logits: ChatLogits, way: str) -> None:
    """Every logit, up to 37, is within 1e-4 of the reference and within 9e-5 of float64.

    The reference is itself 8e-5 from float64; where its processor makes that more, it may be more.
    """
    theirs = float((chat_logits.theirs_TV - chat_logits.exact_TV).abs().max())
    limit = max(1e-4, 1.25 * theirs)
    for ours in WAYS[way](loaded):
        rows = slice(0, len(ours))
        torch.testing.assert_close(ours, chat_logits.theirs_TV[rows], atol=limit, rtol=0)
        torch.testing.assert_close(ours.double(), chat_logits.exact_TV[rows], atol=9e-5, rtol=0)


def test_a_small_mistake_shows(loaded: LoadedModel, chat_logits: ChatLogits) -> None:
    """One norm of 61 that is wrong by one part in 10,000 moves a logit by more than is allowed."""
    assert loaded.model.compiled is not None
    norm_E = loaded.model.compiled._weights.norms_LXE[15, 1]
    before = norm_E.copy()
    norm_E *= 1.0001
    try:
        ours = in_chunks(loaded, 16)[0]
    finally:
        norm_E[:] = before
    assert float((ours - chat_logits.theirs_TV).abs().max()) > 1.5e-4


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
