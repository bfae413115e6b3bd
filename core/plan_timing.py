"""When the next step is planned while one runs: at once, or as late as the worker allows.

A plan is final, so who arrives behind it waits for the step after. In calm times a step is planned
as soon as it may be, which hides every delay of the host; while requests arrive it waits until
shortly before the running step can end, and takes along who has come by then. Owns the estimate of
that moment; never looks at a request. Called by `process.py`.
"""

BURST_US = 10_000
"""So long after an arrival more are expected."""
LEAD_US = 1_500
"""Before the running step's earliest end: for the plan, its way to the worker and the launch."""
_RISE = 64
"""The estimate follows shorter steps at once and longer ones by this part of the difference."""


class PlanTiming:
    """All times are microseconds of one monotonic clock."""

    def __init__(self) -> None:
        self._arrived_us: int | None = None
        self._began_us = 0
        """When the worker began with the oldest step in flight, at the earliest."""
        self._num_in_flight = 0
        self._shortest_us = 0
        """What a step takes at least."""

    def arrived(self, now_us: int) -> None:
        """A request has come."""
        self._arrived_us = now_us

    def sent(self, now_us: int) -> None:
        """A step has left to the worker."""
        if not self._num_in_flight:
            self._began_us = now_us
        self._num_in_flight += 1

    def finished(self, now_us: int, execute_us: int) -> None:
        """The oldest step's result has come; it took the worker so long."""
        self._num_in_flight -= 1
        self._began_us = now_us
        if self._shortest_us:
            longer_us = execute_us - self._shortest_us
            self._shortest_us += longer_us if longer_us < 0 else longer_us // _RISE
        else:
            self._shortest_us = execute_us

    def hold_us(self, now_us: int) -> int:
        """How long the next plan should wait; 0 where it should not."""
        if not self._num_in_flight or self._arrived_us is None:
            return 0
        if now_us - self._arrived_us > BURST_US:
            return 0
        return max(0, self._began_us + self._shortest_us - LEAD_US - now_us)
