"""How long a step takes: a linear model of what it computes, fitted on a log's notes or given.

The device's clock is taken where the notes have it, else the worker's.

    execute_us = fixed + prefill (if the step has chunks) + decode * decodes
                 + prefill_token * prefill tokens + context_token * tokens in KV of all rows
                 + attended * pairs of a prefill token and one that it attends to
    handover_us = between two steps, when the next one waits at the worker already

Owns the model and what it is fitted on. Used by `what_if.py` and `simulate.py`; floats are allowed
here, because no scheduler sees them before they are rounded.
"""

import statistics
from collections.abc import Sequence

import msgspec

from cearx.core.events import StepPlan
from cearx.replay.least_squares import robust_least_squares
from cearx.replay.rows import num_attended, num_batched_tokens
from cearx.replay.step_table import StepTable

NUM_STEPS_MIN = 20
"""Fewer noted steps than this say nothing."""
_STRETCH = 16
"""Steps in a row over which the time between them is measured."""

Terms = tuple[int, int, int, int, int, int]
"""1, whether there are chunks, decodes, prefill tokens, context tokens, attended pairs."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """All in microseconds."""

    fixed: float
    prefill: float = 0.0
    decode: float = 0.0
    prefill_token: float = 0.0
    context_token: float = 0.0
    attended: float = 0.0
    schedule_us: int = 0
    """From the clock reading to the worker's start."""
    gap_us: int = 0
    """From the end of a step to the next clock reading."""
    handover_us: int = 0
    """From the end of a step to the start of one that waits at the worker."""
    decode_residuals: tuple[float, ...] = ()
    """What the fit leaves unexplained of steps without chunks, as factors in the order of the log;
    used in turn."""
    prefill_residuals: tuple[float, ...] = ()
    """The same of steps with chunks."""

    def expected_us(self, terms: Terms) -> float:
        """Of one step, by the coefficients alone."""
        coefficients = (
            self.fixed,
            self.prefill,
            self.decode,
            self.prefill_token,
            self.context_token,
            self.attended,
        )
        return sum(c * term for c, term in zip(coefficients, terms, strict=True))

    def residual(self, has_chunks: bool, index: int) -> float:
        """The factor of the step of its kind with this index."""
        residuals = self.prefill_residuals if has_chunks else self.decode_residuals
        return residuals[index % len(residuals)] if residuals else 1.0


class StepClock:
    """Gives each step of one run its time, in order."""

    def __init__(self, step_time: StepTime) -> None:
        self._step_time = step_time
        self._num_steps = {False: 0, True: 0}
        """With chunks, and without."""

    def execute_us(self, terms: Terms) -> int:
        """Of the next step; at least 1."""
        has_chunks = terms[1] > 0
        index = self._num_steps[has_chunks]
        self._num_steps[has_chunks] += 1
        factor = self._step_time.residual(has_chunks, index)
        return max(1, round(self._step_time.expected_us(terms) * factor))


class NotEnoughNotes(Exception):
    """The log does not say how long its steps took."""


def terms_of_plan(plan: StepPlan, num_context_tokens: int) -> Terms:
    """Of a step whose rows attend to so many tokens in all."""
    decodes, chunks = len(plan.decodes), plan.chunks
    num_prefill = num_batched_tokens(plan) - decodes
    return (1, int(bool(chunks)), decodes, num_prefill, num_context_tokens, num_attended(plan))


def terms_of(steps: StepTable, index: int) -> Terms:
    prefill = steps.num_prefill_tokens[index]
    decodes, context = steps.num_decodes[index], steps.num_context_tokens[index]
    return (1, int(prefill > 0), decodes, prefill, context, steps.num_attended[index])


def fit(steps: StepTable, pipeline_depth: int) -> StepTime:
    """Robust least squares over the steps with a note, no coefficient below zero."""
    noted = [index for index in range(len(steps)) if steps.busy_us(index) > 0]
    if len(noted) < NUM_STEPS_MIN:
        raise NotEnoughNotes(
            f"{len(noted)} steps with measured times, at least {NUM_STEPS_MIN} are needed"
        )
    terms = [terms_of(steps, index) for index in noted]
    times = [steps.busy_us(index) for index in noted]
    coefficients = robust_least_squares(terms, times)
    model = StepTime(
        fixed=coefficients[0],
        prefill=coefficients[1],
        decode=coefficients[2],
        prefill_token=coefficients[3],
        context_token=coefficients[4],
        attended=coefficients[5],
        schedule_us=_start_us(steps, noted),
        gap_us=_gap_us(steps),
        handover_us=_handover_us(steps, pipeline_depth),
    )
    return msgspec.structs.replace(
        model,
        decode_residuals=_residuals(model, terms, times, has_chunks=False),
        prefill_residuals=_residuals(model, terms, times, has_chunks=True),
    )


def _residuals(
    model: StepTime, terms: Sequence[Terms], times: Sequence[int], *, has_chunks: bool
) -> tuple[float, ...]:
    return tuple(
        time / max(model.expected_us(term), 1.0)
        for term, time in zip(terms, times, strict=True)
        if (term[1] > 0) == has_chunks
    )


def _start_us(steps: StepTable, noted: Sequence[int]) -> int:
    """From the clock reading to the worker's start, when the worker has nothing else to do."""
    own = statistics.median(
        steps.schedule_us[index] + steps.log_us[index] + steps.launch_us[index] for index in noted
    )
    # A worker that computes on its own thread takes in a step when the one before is done.
    ways = [steps.receive_us[index] for index in noted if not steps.num_in_flight[index]]
    return round(own + statistics.median(ways or [0]))


def _gap_us(steps: StepTable) -> int:
    """Median of the time between two steps, those aside that waited for work."""
    gaps = sorted(
        max(0, steps.planned_us[index + 1] - steps.finished_us[index])
        for index in range(len(steps) - 1)
        if steps.num_running[index] and steps.finished_us[index]
    )
    return gaps[len(gaps) // 2] if gaps else 0


def _handover_us(steps: StepTable, depth: int) -> int:
    """What a step takes longer than its note says, while others wait behind it.

    With `depth` steps in flight a step is planned when the one `depth` before it is finished, so
    in a stretch of steps the clock shows what they took. Median over stretches in which the worker
    always had a step waiting: a pause is none of it.
    """
    if depth == 1:
        return 0
    excesses = []
    for start in range(0, len(steps) - depth - _STRETCH, _STRETCH):
        end = start + _STRETCH
        if all(steps.num_in_flight[start + 1 : end + depth + 1]):
            clock_us = steps.planned_us[end + depth] - steps.planned_us[start + depth]
            noted_us = sum(steps.busy_us(index) for index in range(start + 1, end + 1))
            excesses.append((clock_us - noted_us) / _STRETCH)
    return max(0, round(statistics.median(excesses))) if excesses else 0
