"""What steps do to the requests that run: who decodes, how far each has come, what is in flight.

Owns the state of the running ones and their lengths, whether or not the batch counts them. Knows
no blocks. Kept by `books.py`; who plans and who takes results in reads it and moves requests.
"""

from collections import deque

import msgspec

from cearx.core.decode_batch import DecodeBatch
from cearx.core.events import StepPlan
from cearx.core.identifiers import RequestId, StepId
from cearx.core.request import Request, RequestState


class InFlightStep(msgspec.Struct, array_like=True, kw_only=True):
    """A step that was planned and is not finished."""

    plan: StepPlan
    left: list[RequestId] = msgspec.field(default_factory=list)
    """Those of its decodes whose rows the batch does not count any more."""

    @property
    def step_id(self) -> StepId:
        return self.plan.step_id


class StepBooks:
    """A broken invariant is an AssertionError."""

    def __init__(self) -> None:
        self.next_step = StepId(0)
        self.in_flight: deque[InFlightStep] = deque()
        self.batch = DecodeBatch()
        self.prefilling: dict[RequestId, Request] = {}
        self.joining: dict[RequestId, Request] = {}
        """The running ones in these two states."""

    def num_scheduled(self, request: Request) -> int:
        if request.state is RequestState.DECODING:
            return self.batch.num_scheduled(request)
        return request.num_scheduled

    def num_promised(self, request: Request) -> int:
        if request.state is RequestState.DECODING:
            return self.batch.num_scheduled(request) + 1
        return request.num_promised

    def num_settled(self, request: Request) -> int:
        if request.state is not RequestState.DECODING:
            return request.num_settled
        rows = len(self._batch_rows(request))
        return self.batch.num_scheduled(request) - rows - request.num_unsettled

    def _batch_rows(self, request: Request) -> list[InFlightStep]:
        """The steps in flight with a row for it that the batch counts."""
        joined = request.joined_step
        assert joined is not None, f"request {request.request_id} never joined the batch"
        return [step for step in self.in_flight if step.step_id >= joined]

    def set_state(self, request: Request, state: RequestState) -> None:
        """Into one of the states of those who run, or out of them."""
        if request.state is RequestState.PREFILLING:
            del self.prefilling[request.request_id]
        elif request.state is RequestState.JOINING:
            del self.joining[request.request_id]
        if state is RequestState.PREFILLING:
            self.prefilling[request.request_id] = request
        elif state is RequestState.JOINING:
            self.joining[request.request_id] = request
        request.state = state

    def join_batch(self, request: Request) -> None:
        """From the present tick, whose step is the next one, it decodes in every step."""
        self.batch.join(request)
        request.joined_step = self.next_step
        self.set_state(request, RequestState.DECODING)

    def leave_batch(self, request: Request, *, has_row: bool = True) -> None:
        """The request counts for itself again; without `has_row` the present tick is not its."""
        self.batch.leave(request)
        rows = self._batch_rows(request)
        request.num_scheduled = self.batch.num_scheduled(request) - (not has_row)
        for step in rows:
            step.left.append(request.request_id)
            request.last_step = step.step_id
        request.num_unsettled += len(rows)
        request.num_pending += len(rows)
        request.num_tokens = request.num_scheduled + 1 - request.num_pending
        self.set_state(request, RequestState.JOINING)
