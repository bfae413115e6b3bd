"""Vectors in place of tokens: equal to transformers' whatever runs beside, hits, or is cut."""

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import torch
from local_engine import LocalEngine
from tiny_models import reference_logits, tiny_model
from transformers import PreTrainedModel
from worker_models import worker_config, worker_model

from cearx.core.identifiers import RequestId
from cearx.core.messages import (
    Embed,
    NewRequest,
    Pooling,
    RowOutput,
    SamplingParams,
    Score,
    pack_tokens,
)
from cearx.worker.grammar_table import GrammarTable
from cearx.worker.pooling import NOT_FINITE, Pooler, normalised
from cearx.worker.request_states import new_state

NEGATIVE, POSITIVE = 21, 93
SCORE = Score(negative=NEGATIVE, positive=POSITIVE)


def reference(tied: bool) -> PreTrainedModel:
    return tiny_model("qwen3", tied=tied)


@cache
def prompts() -> list[list[int]]:
    """Odd lengths, some across many blocks; the last four begin alike."""
    rng = np.random.default_rng(3)
    shared = rng.integers(3, 301, 96).tolist()
    own = [rng.integers(3, 301, n).tolist() for n in (1, 2, 15, 16, 17, 31, 130)]
    return own + [shared + rng.integers(3, 301, n).tolist() for n in (1, 16, 40)] + [shared]


@torch.no_grad()
def expected_embedding(model: PreTrainedModel, prompt: Sequence[int], dims: int) -> torch.Tensor:
    """As Qwen3-Embedding's model card: the last token's state, cut, at length 1."""
    exact = deepcopy(model).double()
    states_TE = exact.model(torch.tensor([list(prompt)]), use_cache=False).last_hidden_state[0]
    vector: torch.Tensor = torch.nn.functional.normalize(states_TE[-1, :dims], p=2, dim=0)
    return vector


def expected_score(model: PreTrainedModel, prompt: Sequence[int]) -> float:
    """As Qwen3-Reranker's model card: log-softmax over the two tokens' logits of the last row."""
    logits_V = reference_logits(model, list(prompt))[-1]
    pair = torch.stack([logits_V[NEGATIVE], logits_V[POSITIVE]]).double()
    return float(torch.nn.functional.log_softmax(pair, dim=0)[1].exp())


WAYS = {
    "together": {},
    "chunks": {"budget": 16},
    "one step at a time": {"pipeline_depth": 1, "budget": 24, "caching": False},
    "preemption": {"num_blocks": 14, "budget": 10, "max_num_seqs": 8, "admission": "greedy"},
}


@cache
def expected(tied: bool, pooling: Pooling) -> list[list[float]]:
    """Of all prompts."""
    model = reference(tied)
    if isinstance(pooling, Score):
        return [[expected_score(model, prompt)] for prompt in prompts()]
    dims = pooling.dimensions or model.config.hidden_size
    return [expected_embedding(model, prompt, dims).tolist() for prompt in prompts()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("pooling", "tied"),
    [(Embed(), True), (Embed(dimensions=17), False), (SCORE, True), (SCORE, False)],
    ids=str,
)
def test_vectors_are_those_of_transformers(way: str, pooling: Pooling, tied: bool) -> None:
    """Alone, in batches beside texts, in chunks, and again where the cache holds the prompt."""
    model = reference(tied)
    engine = LocalEngine(worker_model(model), worker_config(model), **WAYS[way])  # type: ignore[arg-type]
    wanted = expected(tied, pooling)
    beside = [prompts()[4], prompts()[6][:50]]
    together = engine.pool(prompts(), pooling, beside=beside)
    hits = engine.num_cached_tokens
    again = engine.pool(prompts(), pooling)
    alone = [engine.pool([prompt], pooling)[0] for prompt in prompts()[:6]]
    for found in (together, again, alone):
        for vector, right in zip(found, wanted, strict=False):
            assert vector == pytest.approx(right, abs=2e-5)
    assert (engine.num_cached_tokens > hits) == (way != "one step at a time")
    assert (engine.num_preemptions > 0) == (way == "preemption")


def test_a_whole_hit_still_computes_the_last_token() -> None:
    """A prompt of full blocks that are all cached: its last block is computed, its vector right."""
    model = reference(True)
    engine = LocalEngine(worker_model(model), worker_config(model))
    prompt = prompts()[-1]
    assert len(prompt) % 16 == 0
    first = engine.pool([prompt], Embed())
    assert engine.num_cached_tokens == 0
    second = engine.pool([prompt], Embed())
    assert engine.num_cached_tokens == len(prompt) - 16
    assert second[0] == pytest.approx(first[0], abs=1e-6)
    # What a text left in the cache serves a vector, and the other way round.
    tokens = engine.generate([prompt], 4)
    fresh = LocalEngine(worker_model(model), worker_config(model), caching=False)
    assert tokens == fresh.generate([prompt], 4)


def pool_row(state_E: list[float], pooling: Pooling) -> RowOutput:
    """One row through a pooler whose head has row t all t."""
    arrival = NewRequest(
        request_id=RequestId(0),
        token_ids=pack_tokens([1, 2]),
        sampling=SamplingParams(),
        pooling=pooling,
    )
    request = new_state(arrival, 301, GrammarTable(301))
    pooler = Pooler(lambda ids: ids[:, None].float().expand(-1, len(state_E)))
    return pooler.pool(torch.tensor([state_E]), [request])[0]


def test_a_state_that_is_no_number_fails_alone() -> None:
    """The row has an error and no vector, for embeddings and scores."""
    for pooling in (Embed(), Score(negative=1, positive=2)):
        row = pool_row([1.0, math.nan], pooling)
        assert (row.error, row.vector, row.token_id) == (NOT_FINITE, None, None)


def test_extreme_scores_are_finite() -> None:
    """Far from zero the sigmoid is 0 or 1 without a warning."""
    for sign, wanted in ((1, 1.0), (-1, 0.0)):
        row = pool_row([sign * 1e30] * 3, Score(negative=1, positive=2))
        assert row.vector is not None
        assert np.frombuffer(row.vector, "<f4").tolist() == [wanted]


def test_labels_outside_the_vocabulary_fail_the_request() -> None:
    """With the value and the limit."""
    row = pool_row([1.0], Score(negative=2, positive=301))
    assert row.error == "invalid request: labels must be token ids in 0..300, got 301"


def test_raw_states_and_zeros() -> None:
    """Without normalisation the state itself comes, and zeros are not divided by their length."""
    row = pool_row([3.0, -4.0, 9.0], Embed(normalize=False, dimensions=2))
    assert row.vector is not None
    assert np.frombuffer(row.vector, "<f4").tolist() == [3.0, -4.0]
    assert normalised(np.zeros(3, np.float32)).tolist() == [0, 0, 0]
