"""How long a step takes: a linear model of what it computes, fitted on a log's notes or given.

The device's clock is taken where the notes have it, else the worker's.

    execute_us = fixed + prefill (if the step has chunks) + decode * decodes
                 + prefill_token * prefill tokens + context_token * tokens attended to

Owns the model and the least-squares fit, without any library. Used by `what_if.py` and
`simulate.py`; floats are allowed here, because no scheduler sees them before they are rounded.
"""

import statistics
from collections.abc import Sequence

import msgspec

from cearx.replay.timeline import StepTable

NUM_STEPS_MIN = 20
"""Fewer noted steps than this say nothing."""
_NEGLIGIBLE = 1e-9

Terms = tuple[int, int, int, int, int]
"""1, whether there are chunks, decodes, prefill tokens, context tokens."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """All in microseconds."""

    fixed: float
    prefill: float = 0.0
    decode: float = 0.0
    prefill_token: float = 0.0
    context_token: float = 0.0
    schedule_us: int = 0
    """From the clock reading to the worker's start."""
    gap_us: int = 0
    """From the end of a step to the next clock reading."""
    residuals: tuple[float, ...] = ()
    """What the fit leaves unexplained, as factors in the order of the log; used in turn."""

    def execute_us(self, terms: Terms, step_index: int) -> int:
        """Of one step; at least 1."""
        coefficients = (
            self.fixed,
            self.prefill,
            self.decode,
            self.prefill_token,
            self.context_token,
        )
        time = sum(c * term for c, term in zip(coefficients, terms, strict=True))
        if self.residuals:
            time *= self.residuals[step_index % len(self.residuals)]
        return max(1, round(time))


class NotEnoughNotes(Exception):
    """The log does not say how long its steps took."""


def terms_of(steps: StepTable, index: int) -> Terms:
    prefill = steps.num_prefill_tokens[index]
    decodes, context = steps.num_decodes[index], steps.num_context_tokens[index]
    return (1, int(prefill > 0), decodes, prefill, context)


def fit(steps: StepTable) -> StepTime:
    """Least squares over the steps with a note, no coefficient below zero."""
    noted = [index for index in range(len(steps)) if steps.busy_us(index) > 0]
    if len(noted) < NUM_STEPS_MIN:
        raise NotEnoughNotes(
            f"{len(noted)} steps with measured times, at least {NUM_STEPS_MIN} are needed"
        )
    terms = [terms_of(steps, index) for index in noted]
    times = [steps.busy_us(index) for index in noted]
    coefficients = least_squares(terms, times)
    model = StepTime(
        fixed=coefficients[0],
        prefill=coefficients[1],
        decode=coefficients[2],
        prefill_token=coefficients[3],
        context_token=coefficients[4],
        schedule_us=_start_us(steps, noted),
        gap_us=_gap_us(steps),
    )
    residuals = (time / model.execute_us(term, 0) for term, time in zip(terms, times, strict=True))
    return msgspec.structs.replace(model, residuals=tuple(residuals))


def _start_us(steps: StepTable, noted: Sequence[int]) -> int:
    """From the clock reading to the worker's start.

    A worker that computes on its own thread takes in a step when the one before is done, so most
    of these times hold that step's: the shortest tenth says what the way costs.
    """
    own = statistics.median(
        steps.schedule_us[index] + steps.log_us[index] + steps.launch_us[index] for index in noted
    )
    ways = sorted(steps.receive_us[index] for index in noted)
    return round(own) + ways[len(ways) // 10]


def _gap_us(steps: StepTable) -> int:
    """Median of the time between two steps, those aside that waited for work."""
    gaps = sorted(
        max(0, steps.planned_us[index + 1] - steps.finished_us[index])
        for index in range(len(steps) - 1)
        if steps.num_running[index] and steps.finished_us[index]
    )
    return gaps[len(gaps) // 2] if gaps else 0


def least_squares(terms: Sequence[Sequence[int]], times: Sequence[int]) -> list[float]:
    """Coefficients >= 0; a term that would be negative or says nothing new gets 0."""
    width = len(terms[0])
    used = [i for i in range(width) if any(row[i] for row in terms)]
    while True:
        solved = _solve(terms, times, used)
        worst = min(used, key=lambda i: solved[i])
        if solved[worst] >= 0:
            return solved
        used.remove(worst)


def _solve(
    terms: Sequence[Sequence[int]], times: Sequence[int], used: Sequence[int]
) -> list[float]:
    """The normal equations of the used terms, by elimination on scaled columns."""
    scale = {i: float(max(abs(row[i]) for row in terms)) for i in used}
    matrix = [
        [sum(row[i] * row[j] for row in terms) / (scale[i] * scale[j]) for j in used]
        + [sum(row[i] * time for row, time in zip(terms, times, strict=True)) / scale[i]]
        for i in used
    ]
    size = len(used)
    pivots: list[int] = []
    for column in range(size):
        free = [row for row in range(size) if row not in pivots]
        pivot = max(free, key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) < _NEGLIGIBLE * len(terms):
            pivots.append(-1)
            continue
        pivots.append(pivot)
        for row in range(size):
            if row != pivot:
                factor = matrix[row][column] / matrix[pivot][column]
                matrix[row] = [
                    a - factor * b for a, b in zip(matrix[row], matrix[pivot], strict=True)
                ]
    solved = [0.0] * len(terms[0])
    for column, i in enumerate(used):
        if pivots[column] >= 0:
            solution = matrix[pivots[column]]
            solved[i] = solution[-1] / solution[column] / scale[i]
    return solved
