"""The requests that wait, in order.

Owns their order and the sum of their tokens. Decides nothing. Owned by the scheduler.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from cearx.core.identifiers import RequestId
from cearx.core.request import Order, Request


class WaitingQueue:
    """Sorted by `Request.order`, whoever comes in when."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Known tokens of all of them, as of when they came in."""
        self._orders: list[Order] = []
        self._requests: dict[RequestId, tuple[Request, int]] = {}
        """With the tokens that each was counted for."""

    def __len__(self) -> int:
        return len(self._orders)

    def __iter__(self) -> Iterator[Request]:
        for _, request_id in self._orders:
            yield self._requests[request_id][0]

    def first(self, count: int) -> list[Request]:
        return [self._requests[request_id][0] for _, request_id in self._orders[:count]]

    def add(self, request: Request) -> None:
        insort(self._orders, request.order)
        self._requests[request.request_id] = request, request.num_promised
        self.num_tokens += request.num_promised

    def remove(self, request: Request) -> None:
        index = bisect_left(self._orders, request.order)
        assert self._orders[index] == request.order, f"{request.request_id} does not wait"
        del self._orders[index]
        self.num_tokens -= self._requests.pop(request.request_id)[1]
