"""A stall: requests wait, and for five seconds nothing happens for anybody."""

from cearx.core.stall_watch import STALL_S, StallWatch


def test_a_stall_is_told_once() -> None:
    """At the limit, and not again before something happens."""
    watch = StallWatch()
    assert watch.check(100.0, True, 7) is None
    assert watch.check(100.0 + STALL_S - 0.1, True, 7) is None
    assert watch.check(100.0 + STALL_S, True, 7) == STALL_S
    assert watch.check(200.0, True, 7) is None
    assert watch.check(201.0, True, 8) is None
    assert watch.check(206.5, True, 8) == 5.5


def test_progress_and_idleness_are_no_stall() -> None:
    """Time counts from the last progress, and only while something is pending."""
    watch = StallWatch()
    for second in range(100):
        assert watch.check(float(second), True, second // 4) is None
    for second in range(100, 200):
        assert watch.check(float(second), False, 25) is None
    assert watch.check(200.0, True, 25) is None
    assert watch.check(203.0, True, 25) is None
    assert watch.check(204.5, True, 25) == 5.5
