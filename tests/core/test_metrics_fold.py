"""The metrics against a slow count of the same records, row by row, on random runs."""

from collections import deque
from itertools import pairwise

import msgspec
import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_run import CONFIGS, RandomRun

from cearx.core.config import SchedulerConfig
from cearx.core.event_log import NullLog
from cearx.core.events import (
    CancelReason,
    CancelRequested,
    Decision,
    Event,
    FinishReason,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId
from cearx.core.metrics import Histogram, bounds_1_2_5
from cearx.core.metrics_fold import MeteredLog, MetricsFold
from cearx.core.trace_records import StepNote


class TimedLog(NullLog):
    """Records with the time of each; the clock moves unevenly."""

    def __init__(self) -> None:
        self.records: list[tuple[Event | Decision | StepNote, int]] = []
        self.now_us = 0

    def clock(self) -> int:
        self.now_us += 137 + 61 * (len(self.records) % 7)
        return self.now_us

    def append(self, record: Event | Decision | StepNote) -> None:
        self.records.append((record, self.now_us))


def run(config: SchedulerConfig, seed: int) -> tuple[MetricsFold, list[tuple[Event, int]]]:
    """The fold behind a random run, and what it saw with the times."""
    log, fold = TimedLog(), MetricsFold(config.max_model_len)
    seen: list[tuple[Event, int]] = []
    apply = fold.apply

    def note(record: Event, now_us: int) -> None:
        seen.append((record, now_us))
        apply(record, now_us)

    fold.apply = note  # type: ignore[assignment,method-assign]
    RandomRun(config, seed, log=MeteredLog(log, fold, log.clock)).run(120)
    return fold, seen


class Slow:
    """Looks at every row of every step; keeps the times of all tokens."""

    def __init__(self) -> None:
        self.arrived: dict[RequestId, RequestArrived] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.admitted: dict[RequestId, tuple[int, int]] = {}
        self.ended: dict[RequestId, tuple[str, int]] = {}
        self.refused = 0
        self.preempted: list[RequestId] = []
        self.plans: deque[StepPlan] = deque()
        self.reason = CancelReason.DISCONNECT

    def apply(self, record: Event | Decision, now_us: int) -> None:
        if isinstance(record, RequestArrived):
            self.arrived[record.request_id] = record
            self.tokens[record.request_id] = []
        elif isinstance(record, RequestRefused):
            self.refused += 1
        elif isinstance(record, CancelRequested):
            self.reason = record.reason
        elif isinstance(record, StepPlan):
            self.plans.append(record)
            self.preempted += record.preempted
            for admission in record.admitted:
                first = (now_us, admission.num_cached_tokens)
                self.admitted.setdefault(admission.request_id, first)
        elif isinstance(record, StepFinished):
            plan = self.plans.popleft()
            failed = [r.request_id for r in record.stopped if r.reason is FinishReason.FAILED]
            for row in (*plan.decodes, *(c.request_id for c in plan.chunks if c.samples)):
                if row not in self.ended and row not in failed:
                    self.tokens[row].append(now_us)
        elif isinstance(record, RequestEnded):
            self.ended[record.request_id] = (record.reason.name, now_us)


def histogram(bounds: tuple[int, ...], values: list[int]) -> Histogram:
    """By the definition."""
    edges = [float("-inf"), *bounds, float("inf")]
    counts = [sum(low < value <= high for value in values) for low, high in pairwise(edges)]
    return Histogram(bounds=bounds, counts=counts, total=sum(values))


@pytest.mark.parametrize("config", CONFIGS)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_the_fold_equals_a_slow_count(config: SchedulerConfig, seed: int) -> None:
    """Every counter and histogram, under preemption, failures, cancels and late rows."""
    fold, seen = run(config, seed)
    slow = Slow()
    for record, now_us in seen:
        slow.apply(record, now_us)
    counters, histograms = fold.counters, fold.histograms
    ends = [reason for reason, _ in slow.ended.values()]
    assert counters.num_received == len(slow.arrived)
    assert counters.num_stopped == ends.count("STOP")
    assert counters.num_at_length == ends.count("LENGTH")
    assert counters.num_failed == ends.count("FAILED")
    assert counters.num_aborted == ends.count("CANCELLED") + ends.count("TIMEOUT")
    assert counters.num_preemptions == len(slow.preempted)
    assert counters.num_generated_tokens == sum(map(len, slow.tokens.values()))
    started = {i: times for i, times in slow.tokens.items() if times}
    assert counters.num_prompt_tokens == sum(slow.arrived[i].num_prompt_tokens for i in started)
    assert counters.num_cached_prompt_tokens == sum(slow.admitted[i][1] for i in started)
    assert counters.num_hit_tokens == sum(cached for _, cached in slow.admitted.values())

    def same(found: Histogram, values: list[int]) -> None:
        assert found == histogram(found.bounds, values)

    arrived = slow.arrived
    same(histograms.first_token_us, [t[0] - arrived[i].arrived_us for i, t in started.items()])
    gaps = [b - a for t in started.values() for a, b in pairwise(t)]
    same(histograms.inter_token_us, gaps)
    well = {i: end for i, (reason, end) in slow.ended.items() if reason in ("STOP", "LENGTH")}
    same(histograms.e2e_us, [end - arrived[i].arrived_us for i, end in well.items()])
    same(histograms.queue_us, [slow.admitted[i][0] - arrived[i].arrived_us for i in well])
    same(histograms.prefill_us, [slow.tokens[i][0] - slow.admitted[i][0] for i in well])
    same(histograms.decode_us, [slow.tokens[i][-1] - slow.tokens[i][0] for i in well])
    same(histograms.generated_tokens, [len(slow.tokens[i]) for i in well])
    same(histograms.num_preemptions, [slow.preempted.count(i) for i in well])
    many = [slow.tokens[i] for i in well if len(slow.tokens[i]) > 1]
    same(histograms.per_token_us, [(t[-1] - t[0]) // (len(t) - 1) for t in many])


def test_nothing_is_lost() -> None:
    """Received requests are those refused and those ended, once everyone has gone."""
    fold, _ = run(CONFIGS[3], 11)
    counts = fold.counters
    ended = counts.num_stopped + counts.num_at_length + counts.num_aborted + counts.num_failed
    refused = counts.num_refused_impossible + counts.num_refused_queue_full
    assert ended + refused + counts.num_refused_queue_tokens == counts.num_received > 0
    assert sum(fold.histograms.e2e_us.counts) == counts.num_stopped + counts.num_at_length


def test_vectors_are_no_tokens() -> None:
    """A server of vectors counts requests, prompts and times, nothing written."""
    fold = MetricsFold(64, generates=False)
    for number in range(3):
        arrival = RequestArrived(
            request_id=RequestId(number),
            num_prompt_tokens=3,
            max_tokens=1,
            block_hashes=(),
            frontend_index=0,
            arrived_us=1_000,
            priority=0,
            has_exact_length=True,
        )
        fold.apply(arrival, 1_000)
        plan = msgspec.convert(
            [16, number, [], [[number, 0, 3, True]], [[number, [0]]], [[number, 0]], [], []],
            StepPlan,
            strict=False,
        )
        fold.apply(plan, 1_200)
        fold.apply(msgspec.convert([3, number, [], [], 5], StepFinished, strict=False), 5_400)
        ended = RequestEnded(request_id=RequestId(number), reason=FinishReason.LENGTH)
        fold.apply(ended, 5_400)
    counts, times = fold.counters, fold.histograms
    assert (counts.num_stopped, counts.num_at_length, counts.num_generated_tokens) == (3, 0, 0)
    assert counts.num_prompt_tokens == 9
    assert (times.e2e_us.total, times.prefill_us.total) == (3 * 4_400, 3 * 4_200)
    for silent in (times.first_token_us, times.generated_tokens, times.max_tokens, times.decode_us):
        assert sum(silent.counts) == 0


def test_a_stop_string_is_a_stop() -> None:
    """What the frontend's stop strings end has succeeded; its time in the frontend counts."""
    fold = MetricsFold(64)
    fold.note_submit(received_us=400, num_choices=3)
    arrival = RequestArrived(
        request_id=RequestId(0),
        num_prompt_tokens=3,
        max_tokens=9,
        block_hashes=(),
        frontend_index=0,
        arrived_us=1_000,
        priority=0,
        has_exact_length=False,
    )
    fold.apply(arrival, 1_000)
    plan = msgspec.convert(
        [16, 0, [], [[0, 0, 3, True]], [[0, [0]]], [[0, 0]], [], []], StepPlan, strict=False
    )
    fold.apply(plan, 1_200)
    finished = msgspec.convert([3, 0, [], [], 5], StepFinished, strict=False)
    fold.apply(finished, 5_400)
    cancel = CancelRequested(request_id=RequestId(0), reason=CancelReason.STOP_STRING)
    fold.apply(cancel, 6_000)
    fold.apply(RequestEnded(request_id=RequestId(0), reason=FinishReason.CANCELLED), 6_000)
    assert (fold.counters.num_stopped, fold.counters.num_aborted) == (1, 0)
    assert fold.histograms.first_token_us.total == 5_000
    assert fold.histograms.queue_us.total == 200
    assert fold.histograms.num_choices.total == 3


@given(st.lists(st.integers(0, 70)))
def test_buckets_are_those_of_prometheus(values: list[int]) -> None:
    """A value falls into the same bucket as in Prometheus' own client."""
    bounds = bounds_1_2_5(64)
    assert bounds == (1, 2, 5, 10, 20, 50)
    ours = Histogram.of(bounds)
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("x", "y", buckets=bounds, registry=registry)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    cumulative = 0
    for bound, count in zip([*map(float, bounds), float("inf")], ours.counts, strict=True):
        cumulative += count
        name = "+Inf" if bound == float("inf") else str(bound)
        assert registry.get_sample_value("x_bucket", {"le": name}) == cumulative
    assert registry.get_sample_value("x_sum") == ours.total
