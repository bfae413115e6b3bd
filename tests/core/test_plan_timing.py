"""When the core waits with its next plan for who may still come, and when it does not."""

import pytest

from cearx.core.plan_timing import BURST_US, LEAD_US, PlanTiming

STEP_US = 4_000


def measured(*execute_us: int) -> PlanTiming:
    """After so many steps, the last of them finished at 100,000; nothing is in flight."""
    timing = PlanTiming()
    for us in execute_us:
        timing.sent(90_000)
        timing.finished(100_000, us)
    return timing


def test_a_burst_is_waited_for_until_shortly_before_the_step_can_end() -> None:
    """Somebody has come and the worker has just begun: the next plan leaves LEAD_US before it
    ends."""
    timing = measured(STEP_US)
    timing.arrived(199_000)
    assert timing.hold_us(199_000) == 0, "an idle worker waits for nobody"
    timing.sent(200_000)
    assert timing.hold_us(200_000) == STEP_US - LEAD_US
    assert timing.hold_us(201_000) == STEP_US - LEAD_US - 1_000
    assert timing.hold_us(200_000 + STEP_US - LEAD_US) == 0
    assert timing.hold_us(250_000) == 0


def test_nobody_waits_in_calm_times() -> None:
    """Without an arrival, long after one, and before any step was measured."""
    timing = measured(STEP_US)
    timing.sent(200_000)
    assert timing.hold_us(200_000) == 0
    timing.arrived(200_000 - BURST_US - 1)
    assert timing.hold_us(200_000) == 0
    timing.arrived(200_000 - BURST_US)
    assert timing.hold_us(200_000) > 0
    fresh = PlanTiming()
    fresh.arrived(0)
    fresh.sent(10)
    assert fresh.hold_us(10) == 0


def test_a_second_step_begins_when_the_first_is_finished() -> None:
    """Not when it was sent."""
    timing = measured(STEP_US)
    timing.arrived(205_000)
    timing.sent(200_000)
    timing.sent(200_500)
    timing.finished(204_000, STEP_US)
    assert timing.hold_us(205_000) == STEP_US - LEAD_US - 1_000
    timing.finished(208_000, STEP_US)
    assert timing.hold_us(208_000) == 0


@pytest.mark.parametrize("longer_us", [0, 6_400])
def test_short_steps_count_at_once_and_long_ones_slowly(longer_us: int) -> None:
    """A long prompt's step must not make the worker run dry behind the next short one."""
    timing = measured(9_000, STEP_US, STEP_US + longer_us)
    timing.arrived(200_000)
    timing.sent(200_000)
    assert timing.hold_us(200_000) == STEP_US + longer_us // 64 - LEAD_US
