"""Notices that requests wait and nothing happens.

Owns one number and one time; no clock of its own, no logging. The core's loop asks it once a turn.
"""

STALL_S = 5.0
"""How long work may be pending without a token, an admission, an end or a refusal."""


class StallWatch:
    """Progress is a number that grows whenever something happens for somebody."""

    def __init__(self, limit_s: float = STALL_S) -> None:
        self._limit_s = limit_s
        self._progress = -1
        self._since = 0.0
        self._is_told = False

    def check(self, now_s: float, is_pending: bool, progress: int) -> float | None:
        """Seconds without progress, once when they reach the limit; None otherwise."""
        if not is_pending or progress != self._progress:
            self._progress, self._since, self._is_told = progress, now_s, False
            return None
        waited = now_s - self._since
        if waited < self._limit_s or self._is_told:
            return None
        self._is_told = True
        return waited
