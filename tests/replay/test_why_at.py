"""`why` and `at` tell what the plans and the scheduler's own state say."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from trace_samples import write_run

from cearx.core.events import (
    CancelRequested,
    ClockAdvanced,
    Outcome,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    RequestWaits,
    StepPlan,
)
from cearx.core.identifiers import RequestId, StepId
from cearx.core.request import Request
from cearx.core.scheduler import Scheduler
from cearx.replay import cli
from cearx.replay.state_at import NoSuchStep, QueueEntry, block_ranges, state_at
from cearx.replay.timeline import timeline_of
from cearx.replay.trace import Trace, TraceRecord
from cearx.replay.why import explain


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("why"), 300, seed=4)


def row_in(plan: StepPlan, request_id: int) -> tuple[str, str] | None:
    """What a plan itself says about a request: what and why."""
    if request_id in plan.decodes:
        return ("decode", "")
    if any(chunk.request_id == request_id for chunk in plan.chunks):
        return ("prefill", "")
    for wait in plan.waits:
        if wait.request_id == request_id:
            return ("waits", wait.reason.name)
    return None


def queue_heads(records: list[TraceRecord]) -> dict[int, RequestWaits]:
    """The first request of each plan's waits that has no seat."""
    running: set[int] = set()
    heads: dict[int, RequestWaits] = {}
    for record in records:
        value = record.value
        if isinstance(value, RequestEnded):
            running.discard(value.request_id)
        elif isinstance(value, StepPlan):
            running -= set(value.preempted)
            running |= {admission.request_id for admission in value.admitted}
            for wait in value.waits:
                if wait.request_id not in running:
                    heads[value.step_id] = wait
                    break
    return heads


def test_every_step_of_every_request(path: Path) -> None:
    """The spans cover each step of a request's life once and say what the step's plan says."""
    trace = Trace.open(path)
    records = list(trace.records())
    plans = {r.value.step_id: r.value for r in records if isinstance(r.value, StepPlan)}
    arrivals = [r.value for r in records if isinstance(r.value, RequestArrived)]
    heads = queue_heads(records)
    refused = {r.value.request_id for r in records if isinstance(r.value, RequestRefused)}
    seen: set[str] = set()
    for arrival in arrivals:
        spans = explain(trace.header.config, records, arrival.request_id)
        assert spans[0].what == "arrived"
        ends = [span.what for span in spans if span.what in ("ended", "refused")]
        assert ends == ["refused" if arrival.request_id in refused else "ended"]
        covered: list[int] = []
        for span in spans:
            if span.what not in ("waits", "prefill", "decode"):
                continue
            seen.add(span.what if not span.reason.startswith("BEHIND") else "behind")
            assert span.first_step is not None and span.last_step is not None
            steps = range(span.first_step, span.last_step + 1)
            covered += steps
            for step in steps:
                expected = row_in(plans[StepId(step)], arrival.request_id)
                if expected is None:
                    head = heads[step]
                    expected = ("waits", f"BEHIND {head.request_id}: {head.reason.name}")
                assert (span.what, span.reason) == expected
            admitted = [a.request_id for s in steps for a in plans[StepId(s)].admitted]
            assert span.admitted == (admitted if span.what == "waits" else [])
        if covered:
            assert covered == list(range(covered[0], covered[-1] + 1))
    assert seen == {"waits", "behind", "prefill", "decode"}


def first_preempted(path: Path) -> tuple[RequestId, StepId]:
    for record in Trace.open(path).records():
        if isinstance(record.value, StepPlan) and record.value.preempted:
            return record.value.preempted[0], record.value.step_id
    raise AssertionError("nobody is preempted in this run")


def test_why_as_text(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A preempted request: when it was put out, for what it waited, what it got."""
    request_id, step_id = first_preempted(path)
    assert cli.main(["why", str(path), str(request_id)]) == 0
    text = capsys.readouterr().out
    for part in (
        f"request {request_id}",
        "prompt tokens, max_tokens",
        "preempted  its blocks went to requests that arrived before it",
        f"put out: {request_id}",
        f"  {step_id}",
        "tokens computed",
        "ended",
        "waited for",
    ):
        assert part in text
    assert cli.main(["why", str(path), str(request_id), "--json"]) == 0
    spans = json.loads(capsys.readouterr().out)
    trace = Trace.open(path)
    timeline = timeline_of(trace.header.config, trace.records())
    sampled = sum(span["num_sampled"] for span in spans)
    assert sampled == len(timeline.requests[request_id].token_steps) > 0
    assert cli.main(["why", str(path), "99999"]) == 2
    assert "does not mention request 99999" in capsys.readouterr().err


def entries(scheduler: Scheduler, requests: Iterable[Request]) -> list[tuple[object, ...]]:
    """By arrival: id, tokens whose KV is written, blocks."""
    books = scheduler.books
    return [
        (
            r.request_id,
            0 if r.admitted_step is None else books.steps.num_settled(r),
            tuple(r.block_ids),
        )
        for r in sorted(requests, key=lambda r: r.request_id)
    ]


def shown(queue: list[QueueEntry]) -> list[tuple[object, ...]]:
    return [(e.request_id, e.num_written_tokens, e.block_ids) for e in queue]


def test_at_agrees_with_the_scheduler(path: Path) -> None:
    """Queues, tables and pool before, in and behind several steps."""
    trace = Trace.open(path)
    for step in (0, 1, 40, 68, 100, 303):
        scheduler, planned, finished = Scheduler(trace.header.config), False, False
        for record in trace.records():
            value = record.value
            if finished and not isinstance(value, RequestEnded):
                break
            if isinstance(value, StepPlan):
                if value.step_id == step:
                    before = state_at(trace, StepId(step), "before")
                    assert shown(before.running) == entries(
                        scheduler, scheduler.books.running.values()
                    )
                    assert shown(before.waiting) == entries(scheduler, scheduler.books.waiting)
                    planned = True
                scheduler.plan()
                if planned:
                    state = state_at(trace, StepId(step), "planned")
                    assert shown(state.running) == entries(
                        scheduler, scheduler.books.running.values()
                    )
                    assert state.num_held == state.num_blocks - scheduler.books.pool.num_free
                    assert state.budget_used <= state.budget
            elif isinstance(value, ClockAdvanced | RequestArrived | CancelRequested):
                scheduler.apply(value)
            elif not isinstance(value, Outcome) and "Note" not in repr(value):
                scheduler.apply(value)  # type: ignore[arg-type]
                finished = planned
        after = state_at(trace, StepId(step), "after")
        assert shown(after.running) == entries(scheduler, scheduler.books.running.values())
        assert after.num_cached == len(scheduler.books.pool._cached)
        assert after.num_blank == len(scheduler.books.pool._blank)


def test_at_as_text(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tables, the pool and both moments; a step that is not there is refused with the range."""
    request_id, step_id = first_preempted(path)
    assert cli.main(["at", str(path), "--step", str(step_id)]) == 0
    text = capsys.readouterr().out
    assert f"step {step_id}, planned, at" in text and f"put out  {request_id}" in text
    assert "held" in text and "running" in text and "waiting" in text
    assert cli.main(["at", str(path), "--step", str(step_id), "--after", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["preempted"][0] == request_id
    assert cli.main(["at", str(path), "--step", "68", "--after", "--before"]) == 2
    assert cli.main(["at", str(path), "--step", "9999"]) == 2
    assert "there is no step 9999, the trace holds steps 0 to" in capsys.readouterr().err


def test_a_step_that_never_ended(tmp_path: Path) -> None:
    """The log of a killed core: the last plan has no result."""
    log = write_run(tmp_path, 30, seed=1, close=False)
    data = log.read_bytes()
    trace = Trace(data)
    plan = [r for r in trace.records() if isinstance(r.value, StepPlan)][-1]
    following = next(r.offset for r in trace.records() if r.seq == plan.seq + 1)
    cut = Trace(data[:following])
    assert state_at(cut, plan.value.step_id, "planned").step_id == plan.value.step_id  # type: ignore[union-attr]
    with pytest.raises(NoSuchStep, match="the trace ends before its result"):
        state_at(cut, plan.value.step_id, "after")  # type: ignore[union-attr]


def test_block_ranges() -> None:
    """Runs of rising numbers are short."""
    assert block_ranges([3, 4, 5, 12, 9, 10]) == "3-5 12 9-10"  # type: ignore[list-item]
    assert block_ranges([]) == ""
    assert RequestId(1) == 1
