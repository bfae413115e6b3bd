"""Figures: exact for a run that is counted by hand, and right for random ones by other counts."""

import json
from pathlib import Path
from random import Random

import pytest
from random_run import SMALL, RandomRun
from simulated_engine import RecordList
from trace_samples import BOOT_ID, never, write_run

from cearx.core.config import SchedulerConfig
from cearx.core.events import CancelReason, FinishReason, StepPlan
from cearx.core.identifiers import RequestId
from cearx.core.scheduler import Scheduler
from cearx.core.trace_writer import TraceWriter
from cearx.replay import cli
from cearx.replay.figures import (
    RequestFigures,
    Spread,
    percentile,
    request_figures,
    run_figures,
    spread,
)
from cearx.replay.oracle import Cancellation, SimulatedRequest
from cearx.replay.simulation import Arrival, Simulation
from cearx.replay.step_time import StepTime
from cearx.replay.timeline import Timeline, timeline_of
from cearx.replay.trace import TraceRecord

CONFIG = SchedulerConfig(
    block_size=4,
    num_blocks=8,
    max_model_len=64,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    enable_prefix_caching=False,
)


def request(number: int, prompt: int, output: int, **fields: object) -> SimulatedRequest:
    return SimulatedRequest(
        request_id=RequestId(number),
        arrived_us=0,
        num_prompt_tokens=prompt,
        max_tokens=output,
        num_outputs=output,
        **fields,  # type: ignore[arg-type]
    )


def simulated(arrivals: list[Arrival], config: SchedulerConfig = CONFIG) -> Timeline:
    """Steps of 1,000 us, 50 us before and 10 us behind each."""
    timeline = Timeline(config)

    class Feed:
        def append(self, record: object) -> None:
            timeline.feed(record)

    step_time = StepTime(fixed=1000, schedule_us=50, gap_us=10)
    Simulation(Scheduler(config), arrivals, step_time, Feed()).run()
    timeline.finish()
    return timeline


def figures(timeline: Timeline) -> list[RequestFigures]:
    return [request_figures(line, timeline) for line in timeline.requests.values()]


def test_counted_by_hand() -> None:
    """Three requests on two seats with a budget of eight, step by step.

    step 0 at    0: request 0 prefills 8 of 10
    step 1 at 1060: request 0 prefills 2 and samples; request 1 (came at 500) prefills 4, samples
    step 2 at 2120: both decode; request 2 (came at 1500) waits for a seat; 1 ends
    step 3 at 3180: request 0 decodes and ends; request 2 prefills and samples
    step 4 at 4240: request 2 decodes and ends at 5290
    """
    timeline = simulated(
        [
            Arrival(request=request(0, 10, 3), delay_us=0),
            Arrival(request=request(1, 4, 2), delay_us=500),
            Arrival(request=request(2, 3, 2), delay_us=1500),
        ]
    )
    assert list(timeline.steps.planned_us) == [0, 1060, 2120, 3180, 4240]
    assert list(timeline.steps.finished_us) == [1050, 2110, 3170, 4230, 5290]
    assert list(timeline.steps.num_decodes) == [0, 0, 2, 1, 1]
    assert list(timeline.steps.num_prefill_tokens) == [8, 6, 0, 3, 0]
    assert list(timeline.steps.num_context_tokens) == [8, 14, 16, 15, 4]
    assert list(timeline.steps.num_held) == [3, 4, 5, 4, 1]
    assert list(timeline.steps.num_waiting) == [0, 0, 1, 0, 0]
    first, second, third = figures(timeline)
    assert (first.arrived_us, first.queue_us, first.ttft_us, first.total_us) == (0, 0, 2110, 4230)
    assert (first.num_chunks, first.num_output_tokens, first.itl_p50_us) == (2, 3, 1060)
    assert (second.arrived_us, second.queue_us, second.ttft_us) == (500, 560, 1610)
    assert (third.arrived_us, third.queue_us, third.waited_us) == (1500, 1680, 1680)
    assert (third.ttft_us, third.total_us, third.ended) == (2730, 3790, "LENGTH")
    assert third.stall_us == 1680
    run = run_figures(timeline, [first, second, third])
    assert (run.duration_us, run.num_steps, run.num_output_tokens) == (5290, 5, 7)
    assert run.output_tokens_per_s == 7 * 1_000_000 // 5290
    assert run.ended == {"LENGTH": 3}
    assert run.ttft_us == Spread(count=3, mean=2150, p50=2110, p99=2730, max=2730)
    assert run.budget_fill_permille is not None and run.budget_fill_permille.max == 1000
    assert run.block_occupancy_permille is not None and run.block_occupancy_permille.max == 625
    assert run.stall_us == 1060 and run.stall_step == 0


def test_waits_are_run_length_coded() -> None:
    """The reason of each wait that a plan names, with its steps."""
    timeline = simulated(
        [Arrival(request=request(n, 4, 4), delay_us=0) for n in range(3)],
    )
    line = timeline.requests[RequestId(2)]
    assert [(w.first_step, w.last_step, w.reason.name) for w in line.waits] == [(0, 3, "NO_SEAT")]


def test_a_cancel_is_dated() -> None:
    """A request taken back while a step runs ends there, without waiting for it."""
    cancellation = Cancellation(reason=CancelReason.DISCONNECT, after_us=1500, after_outputs=0)
    timeline = simulated(
        [
            Arrival(request=request(0, 4, 9, cancellation=cancellation), delay_us=0),
            Arrival(request=request(1, 4, 9), delay_us=0),
        ]
    )
    line = timeline.requests[RequestId(0)]
    assert (line.ended, line.ended_us) == (FinishReason.CANCELLED, 1061)
    assert len(line.token_steps) == 1


@pytest.mark.parametrize("seed", range(6))
def test_random_runs(seed: int) -> None:
    """Counts and sums against the simulation's own, and against plain loops over the plans."""
    log = RecordList()
    engine = RandomRun(SMALL, seed, log=log).run(120)
    records = [TraceRecord(seq, seq, value) for seq, value in enumerate(log)]
    timeline = timeline_of(SMALL, records)
    found = figures(timeline)
    run = run_figures(timeline, found)
    plans = [value for value in log if isinstance(value, StepPlan)]
    assert run.num_preemptions == engine.num_preemptions == sum(f.num_preemptions for f in found)
    assert run.num_output_tokens == engine.num_output_tokens
    assert run.num_steps == len(plans)
    computed = sum(len(p.decodes) + sum(c.num_tokens for c in p.chunks) for p in plans)
    assert run.num_computed_tokens == computed
    for request_id, reason in engine.ended.items():
        assert timeline.requests[request_id].ended is reason
    assert run.num_recomputed_tokens == recomputed(plans)
    for f in found:
        assert f.waited_us >= (f.queue_us or 0) >= 0
        assert f.ttft_us is None or f.ttft_us > (f.queue_us or 0) - 1
        assert f.total_us is None or f.total_us >= f.stall_us


def recomputed(plans: list[StepPlan]) -> int:
    """Rows below the highest token that was ever computed for the request."""
    position: dict[int, int] = {}
    highest: dict[int, int] = {}
    total = 0
    for plan in plans:
        for chunk in plan.chunks:
            position[chunk.request_id] = chunk.start
        rows = [(i, 1) for i in plan.decodes] + [(c.request_id, c.num_tokens) for c in plan.chunks]
        for request_id, count in rows:
            for token in range(position[request_id], position[request_id] + count):
                total += token < highest.get(request_id, 0)
            position[request_id] += count
            highest[request_id] = max(highest.get(request_id, 0), position[request_id])
    return total


def test_percentiles() -> None:
    """Nearest rank against its definition."""
    random = Random(1)
    for _ in range(50):
        values = sorted(random.randint(0, 50) for _ in range(random.randint(1, 40)))
        for percent in (1, 50, 99, 100):
            rank = next(k for k in range(1, len(values) + 1) if 100 * k >= percent * len(values))
            assert percentile(values, percent) == values[rank - 1]
    assert spread([]) is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text for a person, JSON with the same figures, requests in the order asked for."""
    path = str(write_run(tmp_path, 200, seed=4))
    assert cli.main(["stats", path, "--sort", "wait", "--limit", "3"]) == 0
    text = capsys.readouterr().out
    for word in ("queue time", "time to first token", "preemptions", "worker, a step", "more ("):
        assert word in text
    assert cli.main(["stats", path, "--json", "--sort", "wait"]) == 0
    answer = json.loads(capsys.readouterr().out)
    waits = [entry["waited_us"] for entry in answer["requests"]]
    assert waits == sorted(waits, reverse=True)
    assert answer["run"]["num_requests"] == len(waits)
    assert answer["log_bytes_per_step"] > 50
    assert cli.main(["stats", path, "--sort", "beauty"]) == 2
    assert "'beauty' is none of arrival" in capsys.readouterr().err


def test_nothing_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log without a request has figures too."""
    writer = TraceWriter.open(tmp_path, SMALL, BOOT_ID, never)
    writer.close()
    assert cli.main(["stats", str(tmp_path)]) == 0
    assert "0: none" in capsys.readouterr().out
