"""The step-time model finds what made the times, and nothing that did not."""

from random import Random

import numpy as np
import pytest

from cearx.replay.step_time import NotEnoughNotes, StepTime, fit, least_squares
from cearx.replay.timeline import StepTable


def random_steps(seed: int, model: StepTime, noise: float, count: int = 400) -> StepTable:
    random = Random(seed)
    steps = StepTable()
    now = 0
    for index in range(count):
        decodes = random.randint(0, 64)
        prefill = random.choice([0, 0, 0, random.randint(1, 2000)])
        context = decodes * random.randint(100, 4000) + prefill
        time = model.execute_us((1, int(prefill > 0), decodes, prefill, context), index)
        for name in StepTable.__struct_fields__:
            getattr(steps, name).append(0)
        steps.num_decodes[-1], steps.num_prefill_tokens[-1] = decodes, prefill
        steps.num_context_tokens[-1], steps.num_running[-1] = context, decodes + 1
        steps.execute_us[-1] = round(time * random.uniform(1 - noise, 1 + noise))
        steps.schedule_us[-1] = 90 + index % 3
        steps.planned_us[-1] = now
        steps.finished_us[-1] = now + 91 + steps.execute_us[-1]
        now = steps.finished_us[-1] + 40
    return steps


MODEL = StepTime(fixed=6000, prefill=800, decode=25, prefill_token=11, context_token=0.02)


def test_it_finds_the_coefficients() -> None:
    """Without noise all five and the times in the core are as made."""
    found = fit(random_steps(1, MODEL, 0.0))
    for name in ("fixed", "prefill", "decode", "prefill_token", "context_token"):
        assert getattr(found, name) == pytest.approx(getattr(MODEL, name), rel=0.01)
    assert (found.schedule_us, found.gap_us) == (91, 40)
    assert all(abs(residual - 1) < 0.001 for residual in found.residuals)


@pytest.mark.parametrize("seed", range(4))
def test_it_agrees_with_numpy(seed: int) -> None:
    """The same as another least-squares solver where no coefficient is negative."""
    random = Random(seed)
    terms = [
        (1, random.randint(0, 1), random.randint(0, 64), random.randint(0, 2000)) for _ in range(60)
    ]
    times = [random.randint(10**6, 2 * 10**6) + 500 * b + 90 * c + 3 * d for _, b, c, d in terms]
    expected = np.linalg.lstsq(np.array(terms, float), np.array(times, float), rcond=None)[0]
    if min(expected) < 0:
        expected[expected < 0] = 0
        found = least_squares(terms, times)
        assert min(found) >= 0
    else:
        assert least_squares(terms, times) == pytest.approx(list(expected), rel=1e-6)


def test_nothing_is_negative_and_nothing_is_made_up() -> None:
    """A term that never occurs, repeats another or would speed a step up gets 0."""
    terms = [(1, 0, i, 2 * i, 5) for i in range(1, 40)]
    found = least_squares(terms, [1000 - 3 * i for i in range(1, 40)])
    assert min(found) >= 0
    assert found[1:4] == [0, 0, 0]
    predicted = [sum(c * t for c, t in zip(found, row, strict=True)) for row in terms]
    assert sum(predicted) == pytest.approx(sum(1000 - 3 * i for i in range(1, 40)))


def test_residuals_keep_the_spread() -> None:
    """Noise comes back as factors in the order of the log, so that the tails are as measured."""
    steps = random_steps(2, MODEL, 0.3)
    found = fit(steps)
    again = [
        found.execute_us(
            (
                1,
                int(steps.num_prefill_tokens[i] > 0),
                steps.num_decodes[i],
                steps.num_prefill_tokens[i],
                steps.num_context_tokens[i],
            ),
            i,
        )
        for i in range(len(steps))
    ]
    assert again == pytest.approx(list(steps.execute_us), abs=2)


def test_a_log_without_notes_is_refused() -> None:
    """Ten steps say nothing."""
    with pytest.raises(NotEnoughNotes, match="10 steps with measured times, at least 20"):
        fit(random_steps(1, MODEL, 0.0, count=10))
