"""A step's parts and a first token's hops: exact for a log that is written by hand."""

from pathlib import Path

import msgspec
import pytest
from trace_samples import BOOT_ID, never

from cearx.core.config import SchedulerConfig
from cearx.core.events import ClockAdvanced, RequestArrived, StepFinished, StepPlan
from cearx.core.identifiers import RequestId
from cearx.core.scheduler import Scheduler
from cearx.core.trace_records import StepNote
from cearx.core.trace_writer import TraceWriter
from cearx.replay import cli
from cearx.replay.figures import request_figures, run_figures
from cearx.replay.step_parts import FIRST_TOKEN, first_token_parts, step_parts
from cearx.replay.step_time import fit
from cearx.replay.timeline import Timeline, timeline_of
from cearx.replay.trace import Trace

CONFIG = SchedulerConfig(
    block_size=4,
    num_blocks=64,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    enable_prefix_caching=False,
    pipeline_depth=2,
)
NOTE = StepNote(
    execute_us=5_300,
    schedule_us=70,
    log_us=30,
    receive_us=100,
    launch_us=200,
    device_us=5_000,
    transfer_us=10,
    result_us=150,
    turn_us=5_500,
    apply_us=40,
    deliver_us=60,
)


class Log:
    """A scheduler and the log that its core would write."""

    def __init__(self, folder: Path) -> None:
        self.scheduler = Scheduler(CONFIG)
        self.writer = TraceWriter.open(folder, CONFIG, BOOT_ID, never)

    def arrive(self, number: int, num_tokens: int, max_tokens: int, now_us: int) -> None:
        event = RequestArrived(
            request_id=RequestId(number),
            num_prompt_tokens=num_tokens,
            max_tokens=max_tokens,
            block_hashes=(),
            frontend_index=0,
            arrived_us=now_us,
            priority=0,
            has_exact_length=True,
        )
        self.writer.append(event)
        assert self.scheduler.apply(event) == ()

    def plan(self, now_us: int) -> StepPlan:
        clock = ClockAdvanced(now_us=now_us)
        self.writer.append(clock)
        self.scheduler.apply(clock)
        plan = self.scheduler.plan()
        assert plan is not None
        self.writer.append(plan)
        return plan

    def finish(self, plan: StepPlan, note: StepNote | None) -> None:
        event = StepFinished(
            step_id=plan.step_id,
            stopped=(),
            sealed=(),
            execute_us=5_300 if note is None else note.execute_us,
        )
        self.writer.append(event)
        for outcome in self.scheduler.apply(event):
            self.writer.append(outcome)
        if note is not None:
            self.writer.append(note)


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    """A prompt of 12 tokens in two steps, the second planned while the first ran; one decode."""
    log = Log(tmp_path)
    log.arrive(0, 12, 2, 900)
    first = log.plan(1_000)
    second = log.plan(1_250)
    log.finish(first, NOTE)
    third = log.plan(6_700)
    notes = {
        "second": {"receive_us": 90, "turn_us": 10_400, "device_us": 4_800},
        "third": {"deliver_us": 0, "turn_us": 9_000},
    }
    log.finish(second, msgspec.structs.replace(NOTE, **notes["second"]))
    log.finish(third, msgspec.structs.replace(NOTE, **notes["third"]))
    log.writer.close()
    return timeline_of(CONFIG, Trace.open(tmp_path).records())


def test_a_first_token_hop_by_hop(timeline: Timeline) -> None:
    """From the arrival to the hand-over, as the readings have it."""
    parts = first_token_parts(timeline)
    assert list(parts) == list(FIRST_TOKEN)
    assert {name: column[0] for name, column in parts.items()} == {
        "arrival to plan": 100,
        "plan to dispatch": 100,
        "further chunks": 250,
        "dispatch to launched": 290,
        "behind other steps": 10_400 - 290 - 4_810 - 150,
        "model and transfer": 4_810,
        "result to the core": 150,
        "result to delivered": 100,
    }


def test_the_devices_clock_dates_the_steps(timeline: Timeline) -> None:
    """A step begins when it is launched and the one before it is done."""
    steps = timeline.steps
    first_end = 1_000 + 70 + 30 + 100 + 200 + 5_000 + 10
    assert list(steps.finished_us) == [
        first_end,
        first_end + 4_810,
        max(first_end + 4_810, 6_700 + 400) + 5_010,
    ]
    parts = step_parts(steps)
    assert parts["model, device clock"] == [5_000, 4_800, 5_000]
    assert parts["first tokens out"] == [60, 60]
    run = run_figures(timeline, [request_figures(r, timeline) for r in timeline.requests.values()])
    assert run.step_parts["write the log"].p99 == 30
    assert run.first_token_parts["further chunks"].p50 == 250


def test_what_if_takes_the_devices_time(tmp_path: Path) -> None:
    """Steps of 5,010 us by the device are not the 9,999 us that the worker's clock has."""
    log = Log(tmp_path)
    log.arrive(0, 4, 30, 0)
    for index in range(30):
        plan = log.plan(6_000 * index)
        receive_us = 100 if index % 5 else 4_000
        log.finish(
            plan,
            StepNote(
                execute_us=9_999,
                schedule_us=70,
                log_us=30,
                receive_us=receive_us,
                launch_us=200,
                device_us=5_000,
                transfer_us=10,
            ),
        )
    log.writer.close()
    model = fit(timeline_of(CONFIG, Trace.open(tmp_path).records()).steps, CONFIG.pipeline_depth)
    assert model.expected_us((1, 0, 1, 0, 10, 0)) == pytest.approx(5_010, abs=2)
    assert model.schedule_us == 70 + 30 + 200 + 100


def test_logs_without_readings_have_no_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is shown for what was not measured, and the rest is as before."""
    log = Log(tmp_path)
    log.arrive(0, 4, 1, 0)
    log.finish(log.plan(100), None)
    log.writer.close()
    timeline = timeline_of(CONFIG, Trace.open(tmp_path).records())
    assert step_parts(timeline.steps) == first_token_parts(timeline) == {}
    assert cli.main(["stats", str(tmp_path)]) == 0
    assert "part by part" not in capsys.readouterr().out
