"""The sampler against a slow float64 reference of one row, and planted faults that it must show."""

import functools
import inspect
import math
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_race import race, seed_of_hash, token_uniform

from cearx.core.identifiers import RequestId
from cearx.core.messages import RowOutput, SamplingParams
from cearx.worker.request_states import RequestState
from cearx.worker.sampler import Sampler, first_arrival
from cearx.worker.sampling_rule import SamplingRule

NEAR = 1e-9
"""Cases closer than this to a filter's cut or to a tie decide nothing and are left out."""


def reference_logits(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
) -> list[float]:
    """Bias, then what may not follow, then repetition, frequency and presence penalty."""
    values = [float(x) for x in logits]
    for token_id, bias in params.logit_bias:
        values[token_id] += bias
    if len(outputs) < params.min_tokens:
        for token_id in params.eos_token_ids + params.stop_token_ids:
            if token_id < len(values):
                values[token_id] = -math.inf
    for token_id in range(len(values)):
        ends_word = any(
            [*outputs, token_id][-len(word) :] == list(word) for word in params.bad_words
        )
        allowed = params.allowed_token_ids
        if ends_word or (allowed is not None and token_id not in allowed):
            values[token_id] = -math.inf
        if token_id in prompt or token_id in outputs:
            if values[token_id] > 0:
                values[token_id] /= params.repetition_penalty
            else:
                values[token_id] *= params.repetition_penalty
        times = list(outputs).count(token_id)
        values[token_id] -= params.frequency_penalty * times
        values[token_id] -= params.presence_penalty if times else 0
    return values


def reference_filter(values: list[float], params: SamplingParams) -> list[int] | None:
    """The tokens that min_p, top_k and top_p keep, ascending; None when a cut is too close."""
    peak = max(values)
    weights = [math.exp((x - peak) / params.temperature) for x in values]
    if any(0 < abs(w - params.min_p) < NEAR for w in weights):
        return None
    alive = [i for i, w in enumerate(weights) if w >= params.min_p]
    if 0 < params.top_k < len(alive):
        kth = sorted((values[i] for i in alive), reverse=True)[params.top_k - 1]
        alive = [i for i in alive if values[i] >= kth]
    total = math.fsum(weights[i] for i in alive)
    kept, before = [], 0.0
    for i in sorted(alive, key=lambda i: (-values[i], i)):
        if params.top_p < 1 and 0 < abs(before - params.top_p) < NEAR:
            return None
        if params.top_p < 1 and before >= params.top_p:
            break
        kept.append(i)
        before += weights[i] / total
    return sorted(kept)


def reference_token(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
) -> int | None:
    """The token, or None when the case is too close to call."""
    values = reference_logits(logits, params, prompt, outputs)
    if params.temperature == 0:
        return values.index(max(values))
    kept = reference_filter(values, params)
    if kept is None:
        return None
    scaled = [x / params.temperature for x in values]
    token_id, lead = race(scaled, kept, params.seed, len(outputs))
    return token_id if lead >= NEAR else None


def new_request(
    params: SamplingParams, vocab_size: int, prompt: Sequence[int] = (0,), rule_type: Any = None
) -> RequestState:
    """A request whose rule is built by `rule_type`, the product's unless a fault is planted."""
    rule = (rule_type or SamplingRule)(params, prompt, vocab_size)
    return RequestState(RequestId(7), list(prompt), rule)


def sample_one(
    logits: Sequence[float] | np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (0,),
    outputs: Sequence[int] = (),
    sampler_type: Any = Sampler,
    rule_type: Any = None,
) -> RowOutput:
    """One row through the sampler, after the request has produced `outputs`."""
    request = new_request(params, len(logits), prompt, rule_type)
    for token_id in outputs:
        request.add_output(token_id)
    row = torch.tensor(np.asarray(logits, np.float32))[None]
    output: RowOutput = sampler_type(len(logits)).sample(row, [request])[0]
    return output


@st.composite
def cases(draw_value: st.DrawFn) -> tuple[Any, ...]:
    """Small vocabularies with ties; logits and penalties exact in float32."""
    vocab_size = draw_value(st.integers(1, 40))
    ids = st.integers(0, vocab_size - 1)
    logits = draw_value(
        st.lists(
            st.integers(-40, 40).map(lambda x: x / 8), min_size=vocab_size, max_size=vocab_size
        )
    )
    some_ids = st.lists(ids, max_size=4).map(tuple)
    params = SamplingParams(
        temperature=draw_value(st.sampled_from([0.0, 0.5, 1.0, 1.7, 1e-3])),
        top_p=draw_value(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6])),
        top_k=draw_value(st.sampled_from([0, 1, 2, 5, 39, 1000])),
        min_p=draw_value(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        seed=draw_value(st.integers(0, 2**64 - 1)),
        min_tokens=draw_value(st.integers(0, 3)),
        eos_token_ids=draw_value(some_ids),
        stop_token_ids=draw_value(some_ids),
        repetition_penalty=draw_value(st.sampled_from([1.0, 2.0, 0.5])),
        presence_penalty=draw_value(st.sampled_from([0.0, 1.5, -2.0])),
        frequency_penalty=draw_value(st.sampled_from([0.0, 0.25, -0.5])),
        logit_bias=draw_value(
            st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0]), max_size=3).map(
                lambda d: tuple(d.items())
            )
        ),
        bad_words=draw_value(
            st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)
        ),
        allowed_token_ids=draw_value(
            st.none() | st.lists(ids, min_size=1, max_size=30, unique=True).map(tuple)
        ),
    )
    return (
        logits,
        params,
        draw_value(st.lists(ids, max_size=5)),
        draw_value(st.lists(ids, max_size=5)),
    )


@settings(max_examples=600, deadline=None)
@given(cases())
def test_token_equals_the_reference(case: tuple[Any, ...]) -> None:
    """Any mix of parameters picks the reference's token.

    Where no token is left it is the first that ends the request, and the row fails without one.
    """
    logits, params, prompt, outputs = case
    row = sample_one(logits, params, prompt, outputs)
    if max(reference_logits(logits, params, prompt, outputs)) == -math.inf:
        ends = params.eos_token_ids + params.stop_token_ids
        assert row.token_id == min(ends, default=None)
        assert (row.error is None) == bool(ends)
        return
    expected = reference_token(logits, params, prompt, outputs)
    if expected is not None:
        assert (row.token_id, row.error) == (expected, None)


CHAIN = [
    "uniform",
    "banned_words",
    "penalties",
    "token_filter",
    "sampling_rule",
    "logprobs",
    "sampler",
]

FAULTS = [
    ("sampling_rule", "TokenCounts(prompt) if", "TokenCounts(()) if"),
    (
        "sampling_rule",
        "num_outputs < self.params.min_tokens",
        "num_outputs <= self.params.min_tokens",
    ),
    (
        "sampling_rule",
        "num_outputs < self.params.min_tokens",
        "num_outputs + 1 < self.params.min_tokens",
    ),
    ("sampling_rule", "{*params.eos_token_ids, *params.stop_token_ids}", "{*params.eos_token_ids}"),
    (
        "sampling_rule",
        "{*params.eos_token_ids, *params.stop_token_ids}",
        "{*params.stop_token_ids}",
    ),
    ("sampling_rule", "self._ending_ids] = -np.inf", "self._ending_ids] = 1.0"),
    ("sampling_rule", "logits_V.copy()", "logits_V"),
    ("sampling_rule", "+= self._bias", "-= self._bias"),
    ("sampling_rule", "processed_V[self._refused_ids] = -np.inf", "pass"),
    ("sampling_rule", "self._words.add_output(token_id)", "pass"),
    ("banned_words", "if len(s) == 1", "if len(s) <= 2"),
    ("banned_words", "recent[len(recent) - len(begin) :]", "recent[: len(begin)]"),
    ("banned_words", "len(begin) <= len(recent)", "len(begin) < len(recent)"),
    ("penalties", "np.float32(frequency) * counts", "np.float32(presence) * counts"),
    (
        "penalties",
        "self._counts[self._index_of(token_id)] += 1",
        "self._counts[self._index_of(token_id)] = 1",
    ),
    ("penalties", "(counts > 0)", "(counts >= 0)"),
    ("penalties", "(counts > 0)", "counts"),
    ("penalties", "np.where(values > 0,", "np.where(values > -9,"),
    ("penalties", "values * factor", "values"),
    ("token_filter", "(logits_V, top_k))", "(logits_V, top_k - 1))"),
    ("token_filter", "candidates[logits >= ", "candidates[logits > "),
    ("token_filter", "(logits, top_k)]", "(logits, top_k + 1)]"),
    ("token_filter", "(maxima, top_k)", "(maxima, 1)"),
    ("token_filter", "num_kept = 1 +", "num_kept = 2 +"),
    ("token_filter", 'top_p * total, side="left"', 'top_p * total, side="right"'),
    ("token_filter", "cumsum(ascending[::-1])", "cumsum(ascending)"),
    ("token_filter", "[: num_kept - num_larger]", ""),
    ("token_filter", "weights > least", "weights >= least"),
    ("token_filter", 'least, side="right"', 'least, side="left"'),
    ("token_filter", "weights_V >= min_p", "weights_V > min_p"),
    ("token_filter", "weights_V >= min_p", "weights_V >= min_p * weights_V.sum()"),
    ("token_filter", "/ len(weights_V)", "* 0.5"),
    ("uniform", "(output_index + 1)", "output_index // 2"),
    ("uniform", "(output_index + 1)", "output_index"),
    ("uniform", "np.arange(1,", "np.arange(0, -1 +"),
    ("uniform", "np.arange(1, vocab_size + 1,", "np.arange(vocab_size, 0, -1,"),
    ("uniform", "start = _mix(seed & MASK_64)", "start = seed & MASK_64"),
    ("uniform", "_mix(seed & MASK_64)", "_mix(seed & 0xFFFFFFFF)"),
    ("uniform", "np.uint64(_mix((start", "np.uint64(((start"),
    ("uniform", "self._steps_V[ids]", "self._steps_V[: len(ids)]"),
    ("uniform", "np.right_shift(z, 27,", "np.right_shift(z, 26,"),
    ("uniform", "    z ^= np.right_shift(z, 31, out=shifted)", ""),
    ("uniform", "    z *= MULTIPLIER_2", ""),
    ("uniform", "hashes >>= 12", "hashes >>= 11"),
    ("uniform", "hashes >>= 12", "hashes >>= 13"),
    ("uniform", "1.0 - 2.0**-53", "1.0"),
    ("sampler", "draw(params.seed, num_outputs, ids)", "draw(params.seed, 0, ids)"),
    (
        "sampler",
        "draw(params.seed, num_outputs, ids)",
        "draw(params.seed, num_outputs)[: len(weights)]",
    ),
    ("sampler", "winner if ids is None else int(ids[winner])", "winner"),
    ("sampler", "uniforms, out=uniforms).argmin()", "uniforms, out=uniforms).argmax()"),
    (
        "sampler",
        "int(np.divide(weights, uniforms, out=uniforms).argmin())",
        "len(weights) - 1 - int(np.divide(weights, uniforms)[::-1].argmin())",
    ),
    ("sampler", "np.divide(weights, uniforms,", "np.multiply(weights, uniforms,"),
    ("sampler", "np.log(uniforms, out=uniforms)", "np.negative(uniforms, out=uniforms)"),
    ("sampler", "np.log(uniforms, out=uniforms)", "np.log1p(-uniforms, out=uniforms)"),
    ("sampler", "min(1.0 / temperature", "min(temperature"),
    ("sampler", "if params.top_p < 1:", "if params.top_p < 0.9:"),
    ("sampler", "raw_V.argmax()", "len(raw_V) - 1 - raw_V[::-1].argmax()"),
    (
        "sampler",
        "token_logprobs(raw_V",
        "token_logprobs(rule.process(raw_V, request.num_outputs)",
    ),
    ("logprobs", "1 + num_larger + num_equal_before", "1 + num_larger"),
    ("logprobs", "1 + num_larger + num_equal_before", "num_larger + num_equal_before"),
    ("logprobs", "order[:num_top]", "order[1:num_top]"),
    ("logprobs", "np.argsort(-logits_V", "np.argsort(logits_V"),
]


def load_chain(
    monkeypatch: pytest.MonkeyPatch, fault: tuple[str, str, str] | None
) -> dict[str, types.ModuleType]:
    """Fresh copies of the sampling modules, one of them with a planted fault."""
    fresh: dict[str, types.ModuleType] = {}
    for name in CHAIN:
        full_name = f"cearx.worker.{name}"
        source = inspect.getsource(sys.modules[full_name])
        if fault is not None and fault[0] == name:
            assert fault[1] in source, f"{name} no longer has {fault[1]!r}"
            source = source.replace(fault[1], fault[2])
        module = types.ModuleType(full_name)
        exec(compile(source, f"<{name} with a fault>", "exec"), module.__dict__)
        fresh[name] = module
        monkeypatch.setitem(sys.modules, full_name, module)
    return fresh


def edge_cases() -> Iterator[tuple[Any, ...]]:
    """One of two tokens gets the largest uniform number (it arrives after 1e-16) or the smallest
    (after 36.7), with several logits against or for it; then weights that reach top_p exactly."""
    for token_id, other in ((1, 0), (0, 1)):
        for value in (0, 2**64 - 1):
            for gap in (0.0, 3.0, 30.0):
                logits = np.zeros(2)
                logits[token_id] = -gap if value else gap
                yield logits, SamplingParams(seed=seed_of_hash(value, 2, token_id)), [other], [0, 0]
    for seed in range(12):
        yield np.zeros(4), SamplingParams(seed=seed, top_p=0.5), [0], []


def random_cases(count: int) -> Iterator[tuple[Any, ...]]:
    """Cases of every parameter, mostly one at a time, from a fixed seed."""
    rng = np.random.default_rng(5)
    for n in range(count):
        vocab_size = int(rng.choice([3, 7, 33, 515, 1301]))
        logits = rng.integers(-24, 24, vocab_size) / 8
        if n % 2:  # fewer ties
            logits = rng.integers(-3000, 3000, vocab_size) / 1024
        pick = [rng.integers(0, vocab_size, rng.integers(1, 6)).tolist() for _ in range(5)]
        likely = np.argsort(-logits, kind="stable")[:3].tolist()
        on = set(rng.choice(10, rng.integers(1, 4), replace=False).tolist())
        params = SamplingParams(
            temperature=0.0 if 0 in on else float(rng.choice([1.0, 0.5, 2.0])),
            top_p=float(rng.choice([0.3, 0.5, 0.9, 0.995])) if 1 in on else 1.0,
            top_k=int(rng.choice([1, 2, 4])) if 2 in on else 0,
            min_p=float(rng.choice([math.exp(-0.5), 0.5, 0.1, 1.0])) if 3 in on else 0.0,
            seed=[0, 2**64 - 1, 2**32 + n, n, (n << 33) + 1][int(rng.integers(5))],
            min_tokens=int(rng.integers(1, 6)) if 4 in on else 0,
            eos_token_ids=(likely[0], vocab_size + 5),
            stop_token_ids=tuple(likely[1:2]),
            repetition_penalty=float(rng.choice([2.0, 0.5, 4.0])) if 5 in on else 1.0,
            presence_penalty=2.0 if 6 in on else 0.0,
            frequency_penalty=float(rng.choice([0.5, 4.0])) if 7 in on else 0.0,
            logit_bias=tuple({i: 3.0 for i in pick[0]}.items()) if 8 in on else (),
            num_logprobs=int(rng.integers(0, 4)) if 9 in on else None,
        )
        prompt = [*pick[1], *likely[: rng.integers(0, 3)]]
        outputs = [*pick[2], *likely[: rng.integers(0, 3)], *pick[3][:1] * int(rng.integers(0, 4))]
        if n % 5 == 4:  # words that the best token completes, or would with another beginning
            begin = outputs[-2:] if n % 2 else outputs[:2]
            words = [(*begin, likely[0]), (likely[1],), (pick[4][0], likely[2])]
            params = msgspec.structs.replace(params, bad_words=tuple(words), num_logprobs=None)
        if n % 7 == 6:
            allowed = tuple({*pick[0], *likely[1:]})
            params = msgspec.structs.replace(params, allowed_token_ids=allowed)
        yield logits, params, prompt, outputs
    for outputs in ([1], [1, 1], [2, 1], [1, 2]):  # a word as long as the output, and shorter ones
        for words in (((1, 0),), ((1, 1, 0),), ((2, 1, 0),), ((0, 0),)):
            greedy = SamplingParams(temperature=0, bad_words=words)
            yield np.array([3.0, 2.0, 1.0]), greedy, [0], outputs


@functools.cache
def decided_cases(count: int) -> list[tuple[tuple[Any, ...], int]]:
    """The cases that are not too close to call, and their tokens."""
    every = [*edge_cases(), *random_cases(count)]
    tokens = [(case, reference_token(*case)) for case in every]
    return [(case, token_id) for case, token_id in tokens if token_id is not None]


def check_sampler(modules: dict[str, types.ModuleType], count: int) -> int:
    """Compares tokens and logprobs with the reference; answers how many tokens were compared."""
    types_ = modules["sampler"].Sampler, modules["sampling_rule"].SamplingRule
    for (logits, params, prompt, outputs), expected in decided_cases(count):
        row = sample_one(logits, params, prompt, outputs, *types_)
        assert row.token_id == expected, (row, params)
        if params.num_logprobs is not None:
            exact = logits - math.log(math.fsum(np.exp(logits)))
            order = np.argsort(-logits, kind="stable").tolist()
            assert row.logprobs is not None
            assert row.logprobs.rank == order.index(expected) + 1
            assert row.logprobs.logprob == pytest.approx(exact[expected], abs=1e-9)
            assert [i for i, _ in row.logprobs.top] == order[: params.num_logprobs]
            assert [p for _, p in row.logprobs.top] == pytest.approx(
                exact[order[: params.num_logprobs]].tolist(), abs=1e-9
            )
    numbers = modules["uniform"].TokenUniforms(5).draw(3, 4).tolist()
    assert numbers == [token_uniform(3, 4, token_id) for token_id in range(5)]
    assert modules["sampler"].first_arrival(np.array([0.0, 1, 1]), np.full(3, 0.5)) == 1
    return len(decided_cases(count))


def test_the_check_itself_passes_without_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases that must catch every fault all pass on the product, and most are decisive."""
    assert check_sampler(load_chain(monkeypatch, None), 1200) > 1100


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}: {fault[2].strip()[:40]}")
def test_planted_fault_is_caught(
    fault: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault, planted in a copy of the source, makes the comparison fail."""
    modules = load_chain(monkeypatch, fault)
    with pytest.raises(AssertionError):
        check_sampler(modules, 1200)
        raise RuntimeError(f"not caught: {fault}")


def test_ties_go_to_the_lowest_id() -> None:
    """Greedy takes the first of equal logits, with and without further work on the row."""
    logits = [1.0, 3.0, 3.0, -1.0, 3.0]
    assert sample_one(logits, SamplingParams(temperature=0)).token_id == 1
    bias = SamplingParams(temperature=0, logit_bias=((1, -1.0),))
    assert sample_one(logits, bias).token_id == 2


def test_a_batch_gives_what_each_row_gives_alone() -> None:
    """Mixed greedy and random rows with different rules do not touch each other."""
    vocab_size = 1001
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((24, vocab_size)).astype(np.float32) * 3
    before = logits.copy()
    rules = [
        SamplingParams(temperature=0),
        SamplingParams(seed=3, top_k=20),
        SamplingParams(seed=4, top_p=0.8, num_logprobs=2),
        SamplingParams(seed=5),
        SamplingParams(temperature=0, repetition_penalty=1.3, num_logprobs=0),
        SamplingParams(seed=6, min_p=0.1, presence_penalty=1.0),
    ]
    requests = [new_request(rules[i % 6], vocab_size, [5, 6]) for i in range(24)]
    batch = Sampler(vocab_size).sample(torch.from_numpy(logits), requests)
    alone = [sample_one(logits[i], rules[i % 6], [5, 6]) for i in range(24)]
    assert list(batch) == alone
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0), SamplingParams(), SamplingParams(num_logprobs=1)],
    ids=["greedy", "random", "logprobs"],
)
def test_a_row_with_non_finite_logits_fails_alone(bad: float, params: SamplingParams) -> None:
    """NaN or +inf anywhere in a row fails that row by name; the rows beside it get their tokens."""
    for vocab_size in (1, 2, 31, 515):
        for place in {0, vocab_size // 2, vocab_size - 1}:
            logits = torch.zeros(3, vocab_size)
            logits[1, place] = bad
            rows = Sampler(vocab_size).sample(
                logits, [new_request(params, vocab_size) for _ in range(3)]
            )
            assert rows[1].token_id is None and "not finite" in str(rows[1].error)
            assert rows[0].error is None and rows[2].error is None


def test_minus_infinity_is_probability_zero() -> None:
    """A -inf logit is never drawn and has logprob -9999; nothing but -inf fails the row."""
    logits = [-math.inf, 0.0, -math.inf, 1.0]
    for seed in range(50):
        row = sample_one(logits, SamplingParams(seed=seed, num_logprobs=4))
        assert row.token_id in (1, 3) and row.logprobs is not None
        assert [p for _, p in row.logprobs.top][2:] == [-9999.0, -9999.0]
    assert "not finite" in str(sample_one([-math.inf] * 5, SamplingParams()).error)


def test_penalties_that_overflow_fail_the_row() -> None:
    """A processed row that is no longer finite has no token."""
    tiny = SamplingParams(temperature=0, repetition_penalty=1e-45)
    with np.errstate(over="ignore"):
        row = sample_one([1.0, 2.0], tiny)
    assert row.token_id is None and "after penalties" in str(row.error)


def test_an_exception_in_one_row_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails for one request is that row's error."""
    requests = [new_request(SamplingParams(seed=1), 9) for _ in range(2)]

    def broken(*_: object) -> None:
        raise KeyError("user data")

    assert requests[0].rule is not None
    monkeypatch.setattr(requests[0].rule, "process", broken)
    rows = Sampler(9).sample(torch.zeros(2, 9), requests)
    assert rows[0].error == "sampling failed: KeyError"
    assert rows[1].token_id is not None


@pytest.mark.parametrize("bad_id", [-1, 9, 2**40])
def test_logit_bias_outside_the_vocabulary_is_refused(bad_id: int) -> None:
    """A negative id would write to the end of the row; the message has value and limit."""
    with pytest.raises(ValueError, match=rf"logit_bias must be token ids in 0..8, got {bad_id}"):
        SamplingRule(SamplingParams(logit_bias=((bad_id, 1.0),)), [0], 9)


def test_no_requests_no_rows() -> None:
    """A step whose chunks do not sample has no rows."""
    assert Sampler(9).sample(torch.zeros(0, 9), []) == ()


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
def test_smallest_temperatures_choose_the_largest_logit(temperature: float) -> None:
    """Nothing overflows: below the largest logit every weight is zero."""
    logits = np.linspace(-50, 50, 301)
    assert sample_one(logits, SamplingParams(temperature=temperature, seed=9)).token_id == 300


@pytest.mark.parametrize("temperature", [1e50, 1e300, 1.7e308])
def test_largest_temperatures_forget_the_logits(temperature: float) -> None:
    """All finite logits become equally likely, one of -inf stays impossible, nothing overflows."""
    logits = [-3e38, 1.0, -math.inf, 3e38]
    tokens = {
        sample_one(logits, SamplingParams(temperature=temperature, seed=n)).token_id
        for n in range(60)
    }
    assert tokens == {0, 1, 3}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1.0, 0.3, 1e-12, 1e-300, 5e-324]), max_size=300),
    st.lists(st.sampled_from([0.0, 1.0, 0.3, 1e-12, 1e-300, 5e-324]), max_size=300),
    st.randoms(use_true_random=False),
)
def test_the_first_arrival_has_a_weight(before: list[float], after: list[float], rng: Any) -> None:
    """A weight of zero never wins, whatever numbers the hash gives; equal times go to the first."""
    weights = np.array([*before, 1.0, *after])
    ends = [2.0**-53, 1 - 2.0**-53, 0.5]
    uniforms = np.array([rng.choice([*ends, rng.uniform(0.01, 0.99)]) for _ in weights])
    winner = first_arrival(weights, uniforms.copy())
    assert weights[winner] > 0
    with np.errstate(divide="ignore", over="ignore"):
        times = -np.log(uniforms) / weights
    assert times[winner] <= times.min() * (1 + 1e-15)
    equal = [
        i for i in range(winner) if (weights[i], uniforms[i]) == (weights[winner], uniforms[winner])
    ]
    assert not equal


@settings(max_examples=200, deadline=None)
@given(cases())
def test_filters_do_not_change_a_winner_that_they_keep(case: tuple[Any, ...]) -> None:
    """The token of the unfiltered row is that of the filtered one, unless a filter removed it."""
    logits, params, prompt, outputs = case
    if params.temperature == 0:
        return
    free = msgspec.structs.replace(params, top_k=0, top_p=1.0, min_p=0.0)
    winner = sample_one(logits, free, prompt, outputs).token_id
    filtered = sample_one(logits, params, prompt, outputs).token_id
    if winner != filtered:
        kept = reference_filter(reference_logits(logits, params, prompt, outputs), params)
        assert kept is None or (winner not in kept and filtered in kept)
