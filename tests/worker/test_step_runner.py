"""States, batch inputs and sampling under the real scheduler: a model that sees only the KV cache.

The fake model is in `history_serving.py`: a token is right only if every input of every step before
it was.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from history_serving import MAX_MODEL_LEN, VOCAB_SIZE, Serving, history_logits
from hypothesis import given, settings
from hypothesis import strategies as st

from cearx.core.events import (
    Admission,
    BlocksGranted,
    PrefillChunk,
    StepPlan,
)
from cearx.core.identifiers import BlockId, RequestId, StepId
from cearx.core.messages import (
    ExecuteStep,
    NewRequest,
    SamplingParams,
    TokenLogprobs,
    pack_tokens,
)
from cearx.worker.request_states import RequestState
from cearx.worker.sampler import Sampler
from cearx.worker.sampling_rule import SamplingRule

GREEDY = SamplingParams(temperature=0)


def expected_tokens(prompt: Sequence[int], params: SamplingParams, count: int) -> list[int]:
    """The tokens of a request alone, without states, batches or blocks."""

    request = RequestState(RequestId(0), prompt, SamplingRule(params, prompt, VOCAB_SIZE))
    sampler, tokens = Sampler(VOCAB_SIZE), []
    for _ in range(count):
        logits = torch.from_numpy(history_logits([*prompt, *tokens]))[None]
        token_id = sampler.sample(logits, [request])[0].token_id
        assert token_id is not None
        request.add_output(token_id)
        tokens.append(token_id)
    return tokens


def expected_prompt_logprobs(prompt: Sequence[int], params: SamplingParams) -> list[TokenLogprobs]:
    """Of each token of a prompt but the first, given those before it, by sorting."""
    if params.num_prompt_logprobs is None:
        return []
    told = []
    for index in range(1, len(prompt)):
        logits = torch.from_numpy(history_logits(prompt[:index]))
        logprobs = (logits.double() - torch.logsumexp(logits.double(), 0)).tolist()
        order = sorted(range(VOCAB_SIZE), key=lambda i: (-logprobs[i], i))
        told.append(
            TokenLogprobs(
                logprob=pytest.approx(logprobs[prompt[index]]),
                rank=1 + order.index(prompt[index]),
                top=tuple(
                    (i, pytest.approx(logprobs[i])) for i in order[: params.num_prompt_logprobs]
                ),
            )
        )
    return told


RULES = [
    GREEDY,
    SamplingParams(seed=2**64 - 1, temperature=0.8),
    SamplingParams(seed=3, top_p=0.9, top_k=30, frequency_penalty=0.5),
    SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=0.25),
    SamplingParams(seed=9, min_p=0.1, num_logprobs=2, repetition_penalty=1.2),
    SamplingParams(seed=5, num_prompt_logprobs=3, bad_words=((4,), (7, 9), (30, 31, 32))),
    SamplingParams(temperature=0, num_prompt_logprobs=0, allowed_token_ids=(1, 5, 80, 96)),
]


def prompts(count: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Prompts of mixed lengths, some of which begin alike."""
    shared = rng.integers(0, VOCAB_SIZE, 24).tolist()
    for n in range(count):
        own = rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 18))).tolist()
        yield shared[: int(rng.integers(0, 24))] + own if n % 2 else own


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("num_blocks", "block_size", "budget", "max_num_seqs", "caching"),
    [
        (200, 4, 512, 16, False),  # all at once
        (200, 4, 512, 16, True),
        (200, 5, 16, 16, True),  # chunks of at most 16 tokens
        (22, 4, 32, 8, False),  # preemption
        (22, 4, 20, 8, True),
        (150, 1, 7, 3, True),
    ],
)
def test_tokens_do_not_depend_on_batch_chunks_cache_or_preemption(
    num_blocks: int, block_size: int, budget: int, max_num_seqs: int, caching: bool, depth: int
) -> None:
    """24 requests with different rules each get the tokens that they get alone, in both modes."""
    serving = Serving(num_blocks, block_size, budget, max_num_seqs, caching, depth)
    rng = np.random.default_rng(1)
    wanted, told = {}, {}
    for key, prompt in enumerate(prompts(24, rng)):
        params, count = RULES[key % len(RULES)], int(rng.integers(1, 22))
        serving.submit(key, prompt, count, params)
        wanted[key] = expected_tokens(prompt, params, count)
        told[key] = expected_prompt_logprobs(prompt, params)
    serving.run()
    assert serving.tokens == wanted
    assert serving.told == told
    assert (serving.num_preemptions > 0) == (num_blocks == 22)
    assert caching == (serving.num_cached > 0)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(16, 40),
    st.integers(1, 6),
    st.integers(8, 60),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([1, 2, 2, 3]),
)
def test_any_pool_and_budget_with_cancels(
    seed: int, num_blocks: int, block_size: int, budget: int, seats: int, caching: bool, depth: int
) -> None:
    """Arrivals and cancels between steps: survivors are exact, the cancelled ones a prefix."""
    num_blocks = max(num_blocks, -(-MAX_MODEL_LEN // block_size))
    serving = Serving(num_blocks, block_size, budget, seats, caching, depth)
    rng = np.random.default_rng(seed)
    wanted = {}
    for key, prompt in enumerate(prompts(10, rng)):
        params, count = RULES[int(rng.integers(len(RULES)))], int(rng.integers(1, 12))
        serving.submit(key, prompt, count, params)
        wanted[key] = expected_tokens(prompt, params, count)
        for _ in range(int(rng.integers(0, 4))):
            if serving.is_busy:
                serving.step()
        if rng.random() < 0.3:
            serving.cancel(int(rng.integers(0, key + 1)))
    serving.run()
    for key, tokens in wanted.items():
        finished = key in serving.reasons
        assert serving.tokens[key] == (tokens if finished else tokens[: len(serving.tokens[key])])
    assert serving.engine.num_requests == 0


def test_ended_requests_are_forgotten() -> None:
    """The states hold nobody whose end the core has told, and all seats are free again."""
    serving = Serving(60, 4, 64, 4, True)
    for key in range(9):
        serving.submit(key, [key, 1, 2], 3, GREEDY)
    serving.run()
    serving.submit(9, [5], 1, GREEDY)
    serving.run()
    assert len(serving.states) == 1  # the last one's end comes with the next step
    assert sum(serving.states.seats.num_blocks_S > 0) == 1


def one_step(
    *,
    decodes: tuple[int, ...] = (),
    chunks: tuple[tuple[int, int, int, bool], ...] = (),
    granted: dict[int, tuple[int, ...]] | None = None,
    admitted: tuple[int, ...] = (),
    preempted: tuple[int, ...] = (),
    new: tuple[NewRequest, ...] = (),
    ended: tuple[int, ...] = (),
) -> ExecuteStep:
    """A step by hand; chunks are (request, start, num_tokens, samples)."""
    plan = StepPlan(
        step_id=StepId(0),
        decodes=tuple(map(RequestId, decodes)),
        chunks=tuple(
            PrefillChunk(request_id=RequestId(r), start=s, num_tokens=n, samples=last)
            for r, s, n, last in chunks
        ),
        granted=tuple(
            BlocksGranted(request_id=RequestId(r), block_ids=tuple(map(BlockId, b)))
            for r, b in (granted or {}).items()
        ),
        admitted=tuple(Admission(request_id=RequestId(r), num_cached_tokens=0) for r in admitted),
        preempted=tuple(map(RequestId, preempted)),
        waits=(),
    )
    return ExecuteStep(plan=plan, new_requests=new, ended=tuple(map(RequestId, ended)))


def arrival(request_id: int, tokens: list[int], params: SamplingParams = GREEDY) -> NewRequest:
    """A request's first message."""
    return NewRequest(
        request_id=RequestId(request_id), token_ids=pack_tokens(tokens), sampling=params
    )


def first_step(*arrivals: NewRequest) -> ExecuteStep:
    """Admits the requests and computes their 3-token prompts in one block each."""
    ids = [a.request_id for a in arrivals]
    return one_step(
        new=arrivals,
        admitted=tuple(ids),
        granted={r: (r,) for r in ids},
        chunks=tuple((r, 0, 3, True) for r in ids),
    )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (arrival(1, [5, VOCAB_SIZE, 2]), "prompt must be token ids in 0..96, got 97"),
        (arrival(1, [5, -1, 2]), "prompt must be token ids in 0..96, got -1"),
        (
            arrival(1, [5, 6, 2], SamplingParams(logit_bias=((200, 1.0),))),
            "logit_bias must be token ids in 0..96, got 200",
        ),
    ],
)
def test_a_request_that_cannot_be_set_up_fails_alone(bad: NewRequest, reason: str) -> None:
    """Its own row fails with the value and the limit, in its first sampling step."""
    serving = Serving(10, 4, 64, 4, False)
    rows = serving.runner.execute(
        first_step(arrival(0, [1, 2, 3]), bad, arrival(2, [4, 5, 6]))
    ).rows
    assert [row.token_id is None for row in rows] == [False, True, False]
    assert reason in str(rows[1].error)
    assert rows[0].token_id == int(history_logits([1, 2, 3]).argmax())


def test_a_prompt_longer_than_the_budget_alone() -> None:
    """Its first steps sample nothing at all."""
    serving = Serving(50, 4, 7, 3, False)
    prompt = list(range(40))
    serving.submit(0, prompt, 3, RULES[0])
    serving.run()
    assert serving.tokens == {0: expected_tokens(prompt, RULES[0], 3)}


def test_a_step_without_rows() -> None:
    """Chunks that end before the last known token give no row; a plan without work neither."""
    serving = Serving(10, 4, 64, 4, False)
    step = one_step(
        new=(arrival(0, [1, 2, 3]),),
        admitted=(0,),
        granted={0: (0,)},
        chunks=((0, 0, 2, False),),
    )
    assert serving.runner.execute(step).rows == ()
    assert serving.runner.execute(one_step()).rows == ()
    rows = serving.runner.execute(one_step(chunks=((0, 2, 1, True),))).rows
    assert rows[0].token_id == int(history_logits([1, 2, 3]).argmax())


@pytest.mark.parametrize(
    "step",
    [
        one_step(decodes=(5,)),  # nobody knows it
        one_step(decodes=(0,), preempted=(0,)),  # lost its blocks
        one_step(chunks=((0, 0, 4, False),)),  # stops at the last known token
        one_step(chunks=((0, 0, 9, True),)),  # more tokens than there are
        one_step(granted={0: tuple(range(17))}),  # more blocks than a request can have
        one_step(admitted=(0,)),  # runs already
        one_step(new=(arrival(0, [1]),)),  # known already
        one_step(preempted=(0,), granted={0: (1,)}),  # blocks without a seat
    ],
    ids=["unknown", "preempted", "samples", "beyond", "blocks", "admitted", "known", "seatless"],
)
def test_a_plan_that_contradicts_the_states_is_a_broken_invariant(step: ExecuteStep) -> None:
    """Such a step raises instead of computing something else."""
    serving = Serving(10, 4, 64, 4, False)
    serving.runner.execute(first_step(arrival(0, [1, 2, 3])))
    with pytest.raises((AssertionError, KeyError, TypeError)):
        serving.runner.execute(step)


def test_a_decode_beyond_its_blocks_is_a_broken_invariant() -> None:
    """A missing block would write into a block of another request."""
    serving = Serving(10, 4, 64, 4, False)
    serving.runner.execute(first_step(arrival(0, [1, 2, 3])))
    serving.runner.execute(one_step(decodes=(0,)))
    with pytest.raises(AssertionError, match="fewer blocks"):
        serving.runner.execute(one_step(decodes=(0,)))
