"""Where the microseconds of a step went: the core's readings joined with what the worker tells.

Owns the readings of the steps in flight and the notes that become of them. The worker's clock is
the core's: both read the machine's monotonic clock. Decides nothing; called by `process.py`.
"""

from collections import deque

import msgspec

from cearx.core.events import StepPlan
from cearx.core.messages import StepResult
from cearx.core.trace_records import StepNote


class SentStep(msgspec.Struct, frozen=True):
    """A step that is on its way, or with the worker."""

    schedule_us: int
    log_us: int
    sent_us: int
    """When it left."""
    samples_prompts: bool
    """Whether somebody may get a first token from it."""


class StepTimes:
    """One core's; all times are microseconds of one monotonic clock."""

    def __init__(self) -> None:
        self._sent: deque[SentStep] = deque()

    def sent(self, plan: StepPlan, start_us: int, planned_us: int, logged_us: int) -> None:
        """A step is planned since `start_us`, ready, in the log, and leaves now."""
        self._sent.append(
            SentStep(
                planned_us - start_us,
                logged_us - planned_us,
                logged_us,
                any([chunk.samples for chunk in plan.chunks]),
            )
        )

    def finished(self) -> SentStep:
        """The oldest step; its result has come."""
        return self._sent.popleft()


def step_note(
    step: SentStep, result: StepResult, *, taken_us: int, applied_us: int, delivered_us: int | None
) -> StepNote:
    """What goes to the log; `delivered_us` where the tokens have left already."""
    received_us, done_us = result.received_us, result.sent_us
    return StepNote(
        execute_us=result.execute_us,
        schedule_us=step.schedule_us,
        log_us=step.log_us,
        receive_us=0 if received_us is None else max(0, received_us - step.sent_us),
        launch_us=result.launch_us,
        device_us=result.device_us,
        transfer_us=result.transfer_us,
        result_us=0 if done_us is None else max(0, taken_us - done_us),
        turn_us=taken_us - step.sent_us,
        apply_us=applied_us - taken_us,
        deliver_us=0 if delivered_us is None else delivered_us - applied_us,
    )
