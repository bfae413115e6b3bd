"""The requests that decode in every step, at no cost for those where nothing is due.

A member's lengths grow by one a step, so nobody counts them one by one: the batch has a clock, a
member its base, and a calendar says at which tick a member needs a block or samples its last token.
Owned by the scheduler; a member that leaves gets its lengths back from there.
"""

from bisect import bisect_left, insort

import msgspec

from cearx.core.identifiers import RequestId
from cearx.core.request import Request


class DecodeBatchState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    clock: int
    calendar: tuple[tuple[int, tuple[RequestId, ...]], ...]
    """(tick, who is due then); those who have left since are passed over."""


class DecodeBatch:
    """Members by rising id, a clock that ticks once a step, a calendar."""

    def __init__(self) -> None:
        self.clock = 0
        self._members: list[RequestId] = []
        self._rows: tuple[RequestId, ...] | None = ()
        self._calendar: dict[int, list[RequestId]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def rows(self) -> tuple[RequestId, ...]:
        """The members; the same object as long as nobody joins or leaves."""
        if self._rows is None:
            self._rows = tuple(self._members)
        return self._rows

    def tick(self) -> list[RequestId]:
        """One more step; answers who may be due in it."""
        self.clock += 1
        return self._calendar.pop(self.clock, [])

    def join(self, request: Request) -> None:
        """From the present tick on, so that its row of this step is counted."""
        request.base = request.num_scheduled + 1 - self.clock
        insort(self._members, request.request_id)
        self._rows = None

    def leave(self, request: Request) -> None:
        index = bisect_left(self._members, request.request_id)
        assert self._members[index] == request.request_id, f"{request.request_id} does not decode"
        del self._members[index]
        self._rows = None

    def set_due(self, request: Request, block_size: int) -> None:
        """Enters the next tick at which its row needs a block or samples its last token."""
        tick = min(len(request.block_ids) * block_size + 1, request.final_length) - request.base
        self._calendar.setdefault(tick, []).append(request.request_id)

    def num_scheduled(self, request: Request) -> int:
        """Of a member, with its row of the present tick."""
        return request.base + self.clock

    def snapshot(self) -> DecodeBatchState:
        calendar = tuple((tick, tuple(ids)) for tick, ids in sorted(self._calendar.items()))
        return DecodeBatchState(clock=self.clock, calendar=calendar)

    @classmethod
    def restore(cls, state: DecodeBatchState, members: list[RequestId]) -> "DecodeBatch":
        batch = cls()
        batch.clock = state.clock
        batch._calendar = {tick: list(ids) for tick, ids in state.calendar}
        batch._members = sorted(members)
        batch._rows = None
        return batch
