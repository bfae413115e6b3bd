"""Where a step's microseconds went: readings of two processes become one note."""

import pytest

from cearx.core.events import PrefillChunk, StepPlan
from cearx.core.identifiers import RequestId, StepId
from cearx.core.messages import StepResult
from cearx.core.step_times import StepTimes, step_note
from cearx.core.trace_records import StepNote


def plan(*samples: bool) -> StepPlan:
    """One chunk for each of them."""
    chunks = [
        PrefillChunk(request_id=RequestId(i), start=0, num_tokens=4, samples=one)
        for i, one in enumerate(samples)
    ]
    return StepPlan(
        step_id=StepId(0),
        decodes=(),
        chunks=tuple(chunks),
        granted=(),
        admitted=(),
        preempted=(),
        waits=(),
    )


RESULT = StepResult(
    step_id=StepId(0),
    rows=(),
    execute_us=5_100,
    launch_us=200,
    device_us=5_000,
    transfer_us=9,
    received_us=1_190,
    sent_us=7_000,
)


def test_a_note_joins_both_clocks() -> None:
    """Each part is the time between two readings, those of the worker as they are told."""
    times = StepTimes()
    times.sent(plan(True), 1_000, 1_070, 1_100)
    times.sent(plan(), 1_200, 1_203, 1_207)
    step = times.finished()
    note = step_note(step, RESULT, taken_us=7_150, applied_us=7_200, delivered_us=7_290)
    assert note == StepNote(
        execute_us=5_100,
        schedule_us=70,
        log_us=30,
        receive_us=90,
        launch_us=200,
        device_us=5_000,
        transfer_us=9,
        result_us=150,
        turn_us=6_050,
        apply_us=50,
        deliver_us=90,
    )
    second = step_note(
        times.finished(), RESULT, taken_us=9_000, applied_us=9_001, delivered_us=None
    )
    assert (second.schedule_us, second.log_us, second.deliver_us) == (3, 4, 0)


def test_a_worker_without_a_clock_or_with_a_late_one_gives_no_negative_time() -> None:
    """What was not measured is 0."""
    times = StepTimes()
    bare = StepResult(step_id=StepId(0), rows=(), execute_us=7)
    for result in (
        bare,
        StepResult(step_id=StepId(0), rows=(), execute_us=7, received_us=5, sent_us=9_999),
    ):
        times.sent(plan(), 1_000, 1_070, 1_100)
        note = step_note(
            times.finished(), result, taken_us=7_150, applied_us=7_150, delivered_us=None
        )
        assert (note.receive_us, note.result_us, note.execute_us) == (0, 0, 7)


@pytest.mark.parametrize(
    ("samples", "expected"), [((), False), ((False,), False), ((False, True), True)]
)
def test_first_tokens_come_from_chunks_that_sample(
    samples: tuple[bool, ...], expected: bool
) -> None:
    """Only then tokens leave before the next plan."""
    times = StepTimes()
    times.sent(plan(*samples), 0, 0, 0)
    assert times.finished().samples_prompts is any(samples)
