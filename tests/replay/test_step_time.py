"""The step-time model finds what made the times, and nothing that did not."""

from random import Random

import numpy as np
import pytest

from cearx.replay.least_squares import least_squares
from cearx.replay.step_table import StepTable
from cearx.replay.step_time import NotEnoughNotes, StepClock, StepTime, Terms, fit, terms_of

NAMES = ("fixed", "prefill", "decode", "prefill_token", "context_token", "attended")


def random_terms(random: Random) -> Terms:
    """A step's: decodes, and in every fourth step a chunk of a prompt that was begun or not."""
    decodes = random.randint(0, 64)
    prefill = random.choice([0, 0, 0, random.randint(1, 2000)])
    start = random.choice([0, random.randint(0, 8000)]) if prefill else 0
    context = decodes * random.randint(100, 4000) + start + prefill
    attended = prefill * start + prefill * (prefill + 1) // 2
    return (1, int(prefill > 0), decodes, prefill, context, attended)


def table_of(terms: list[Terms], times: list[int], handover_us: int = 0) -> StepTable:
    """One step behind the other, each planned when the one two before it is finished."""
    steps = StepTable()
    ends = [0]
    for index, ((_one, _has, decodes, prefill, context, attended), time) in enumerate(
        zip(terms, times, strict=True)
    ):
        for name in StepTable.__struct_fields__:
            getattr(steps, name).append(0)
        planned_us = ends[index - 1] if index > 1 else 0
        begun_us = max(planned_us + 90 + index % 3, ends[index] + (handover_us if index else 0))
        steps.num_decodes[-1], steps.num_prefill_tokens[-1] = decodes, prefill
        steps.num_context_tokens[-1], steps.num_running[-1] = context, decodes + 1
        steps.num_attended[-1], steps.num_in_flight[-1] = attended, int(index > 0)
        steps.execute_us[-1], steps.schedule_us[-1] = time, 90 + index % 3
        steps.planned_us[-1], steps.finished_us[-1] = planned_us, begun_us + time
        ends.append(begun_us + time)
    return steps


def random_steps(seed: int, model: StepTime, noise: float, count: int = 400) -> StepTable:
    random = Random(seed)
    terms = [random_terms(random) for _ in range(count)]
    times = [round(model.expected_us(t) * random.uniform(1 - noise, 1 + noise)) for t in terms]
    return table_of(terms, times)


MODEL = StepTime(
    fixed=6000, prefill=800, decode=25, prefill_token=11, context_token=0.02, attended=0.0005
)


def test_it_finds_the_coefficients() -> None:
    """Without noise all six and the time in the core are as made."""
    found = fit(random_steps(1, MODEL, 0.0), 2)
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(MODEL, name), rel=0.01), name
    assert (found.schedule_us, found.handover_us) == (91, 0)
    residuals = (*found.decode_residuals, *found.prefill_residuals)
    assert len(residuals) == 400
    assert all(abs(residual - 1) < 0.001 for residual in residuals)


def test_outliers_and_a_bad_spell_do_not_bend_it() -> None:
    """Every 20th step takes 8 times as long, the first 30 times, a tenth of the run twice."""
    random = Random(7)
    terms = [random_terms(random) for _ in range(600)]
    times = []
    for index, term in enumerate(terms):
        factor = random.uniform(0.97, 1.03) * (2 if 200 <= index < 260 else 1)
        factor *= 30 if index == 0 else 8 if index % 20 == 7 else 1
        times.append(round(MODEL.expected_us(term) * factor))
    found = fit(table_of(terms, times), 2)
    for term in terms:
        assert found.expected_us(term) == pytest.approx(MODEL.expected_us(term), rel=0.05)
    plain = least_squares(terms, times)
    assert plain[0] > 1.3 * MODEL.fixed, "the noise bends a plain fit, or this proves nothing"
    clock = StepClock(found)
    again = [clock.execute_us(term) for term in terms]
    assert again == pytest.approx(times, abs=2), "what it does not explain is kept as it was"


@pytest.mark.parametrize("handover_us", [0, 700])
def test_the_time_between_steps_is_found(handover_us: int) -> None:
    """From the clock alone; a pause now and then is none of it."""
    random = Random(3)
    terms = [random_terms(random) for _ in range(400)]
    times = [round(MODEL.expected_us(term)) for term in terms]
    steps = table_of(terms, times, handover_us)
    assert abs(fit(steps, 2).handover_us - handover_us) <= 1
    pauses = 0
    for index in range(len(steps)):
        pauses += 300_000 if index % 100 == 50 else 0
        steps.planned_us[index] += pauses
    assert abs(fit(steps, 2).handover_us - handover_us) <= 1
    assert fit(steps, 1).handover_us == 0, "with one step at a time the gap says it"


def test_a_worker_that_runs_dry_says_nothing_of_handovers() -> None:
    """Where steps wait for requests the clock shows when these came."""
    steps = random_steps(1, MODEL, 0.0)
    for index in range(len(steps)):
        steps.planned_us[index] += 5000 * index
        steps.num_in_flight[index] = int(index % 5 > 0)
    assert fit(steps, 2).handover_us == 0


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
    clock = StepClock(fit(steps, 2))
    again = [clock.execute_us(terms_of(steps, index)) for index in range(len(steps))]
    assert again == pytest.approx(list(steps.execute_us), abs=2)


def test_a_log_without_notes_is_refused() -> None:
    """Ten steps say nothing."""
    with pytest.raises(NotEnoughNotes, match="10 steps with measured times, at least 20"):
        fit(random_steps(1, MODEL, 0.0, count=10), 2)
