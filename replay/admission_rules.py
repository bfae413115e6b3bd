"""Who may be put out and let in: requests that run and wait (I8), in an order that passes the head
only so often (I11), and a preempted one with nothing in flight (I12).

Owns how often each request was passed. Called by `invariants.py` before the plan is in the books.
"""

from collections.abc import Iterator

from cearx.core.events import RequestArrived, StepPlan
from cearx.core.identifiers import RequestId
from cearx.replay.ledger import Ledger
from cearx.replay.violation import Finding


class AdmissionRules:
    """Reads the ledger; hears of every arrival and end."""

    def __init__(self, ledger: Ledger, max_overtaken: int) -> None:
        self._ledger = ledger
        self._config = ledger.config
        self._max_overtaken = max_overtaken
        self._orders: dict[RequestId, tuple[int, RequestId]] = {}
        """(priority, arrival) of each request; all priorities are 0 under the other policy."""
        self._overtaken: dict[RequestId, int] = {}

    def begin(self) -> None:
        """Goes on from the ledger's books; who was overtaken before is not known."""
        self._overtaken.clear()
        self._orders = {i: (r.priority, i) for i, r in self._ledger.live.items()}

    def arrive(self, event: RequestArrived) -> None:
        priority = event.priority if self._config.scheduling_policy == "priority" else 0
        self._orders[event.request_id] = (priority, event.request_id)

    def end(self, request_id: RequestId) -> None:
        self._overtaken.pop(request_id, None)
        self._orders.pop(request_id, None)

    def judge_preemptions(self, plan: StepPlan) -> Iterator[Finding]:
        for request_id in plan.preempted:
            request = self._ledger.live.get(request_id)
            if request is None or not request.is_running:
                yield "I8", f"request {request_id} is preempted and does not run", (request_id,)

    def judge_admissions(self, plan: StepPlan) -> Iterator[Finding]:
        if plan.admitted and plan.preempted and self._config.scheduling_policy == "fcfs":
            ids = (*(a.request_id for a in plan.admitted), *plan.preempted)
            yield "I12", "lets somebody in and preempts somebody in the same step", ids
        size = self._config.block_size
        waiting = {r.request_id for r in self._ledger.waiting()} | set(plan.preempted)
        for admission in plan.admitted:
            mine, cached = admission.request_id, admission.num_cached_tokens
            request = self._ledger.live.get(mine)
            if request is None or mine not in waiting:
                yield "I8", f"request {mine} is let in and does not wait", (mine,)
                continue
            waiting.discard(mine)
            self._overtaken.pop(mine, None)
            known = request.num_tokens + request.num_pending
            if request.num_pending:
                text = f"request {mine} is let in while a token of it is in flight"
                yield "I12", text, (mine,)
            if cached % size or not 0 <= cached < known:
                yield "I3", f"request {mine}: {cached} of {known} tokens cached", (mine,)
            for other in sorted(waiting):
                if other in self._orders and self._orders[other] < self._orders[mine]:
                    yield from self._overtake(other, mine)

    def _overtake(self, other: RequestId, mine: RequestId) -> Iterator[Finding]:
        count = self._overtaken[other] = self._overtaken.get(other, 0) + 1
        if count == self._max_overtaken + 1:
            text = f"request {other} waits and {mine} is let in, the {count}. that overtakes it"
            yield "I11", text, (other, mine)
