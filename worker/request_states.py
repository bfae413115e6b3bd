"""What the worker remembers of each request: tokens, sampling rule, and the seat while it runs.

Owns the requests between their arrival and their end, as the steps' messages tell them. Never
decides anything: a step that does not fit what is known is a broken invariant. Called by the step
runner, once before and once after each step.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cearx.core.identifiers import RequestId
from cearx.core.messages import (
    ExecuteStep,
    NewRequest,
    Pooling,
    RowOutput,
    Score,
    unpack_tokens,
)
from cearx.worker.grammar_table import GrammarTable
from cearx.worker.sampling_rule import SamplingRule, check_token_ids
from cearx.worker.seats import SeatTable

SPARE_TOKENS = 64
"""Room for output tokens that a request gets at once; doubled whenever it is used up."""


class RequestState:
    """One request. Its tokens are those of the prompt and then the sampled ones, in any state."""

    def __init__(
        self,
        request_id: RequestId,
        prompt: Sequence[int] | NDArray[np.int32],
        rule: SamplingRule | None,
        error: str = "",
        pooling: Pooling | None = None,
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(prompt)
        self._tokens = np.empty(len(prompt) + SPARE_TOKENS, np.int32)
        self._tokens[: len(prompt)] = prompt
        self.rule = rule
        """None when the request cannot be sampled, for the reason in `error`."""
        self.error = error
        self.pooling = pooling
        """What its one row brings, when that is no token."""
        self.seat: int | None = None
        """Its row in the seat table while it runs."""

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def tokens(self, start: int, end: int) -> NDArray[np.int32]:
        """Known tokens [start, end), a view that holds until the next one is added."""
        assert 0 <= start < end <= self.num_tokens, (
            f"request {self.request_id}: tokens [{start}, {end}) of {self.num_tokens}"
        )
        return self._tokens[start:end]

    def fail(self, error: str) -> None:
        """Nothing can be sampled for it any more; it ends when its next row fails."""
        self.rule = None
        self.error = error

    def add_output(self, token_id: int) -> None:
        """Appends a sampled token."""
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.rule is not None:
            self.rule.add_output(token_id)


class RequestStates:
    """All requests that the worker knows."""

    def __init__(self, seats: SeatTable, vocab_size: int) -> None:
        self.seats = seats
        self.vocab_size = vocab_size
        self.grammars = GrammarTable(vocab_size)
        self._states: dict[RequestId, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, request_id: RequestId) -> RequestState:
        return self._states[request_id]

    def begin_step(self, step: ExecuteStep) -> None:
        """Applies what a step says before its work: ended, new, preempted, admitted, granted."""
        for request_id in step.ended:
            state = self._states.pop(request_id, None)  # to forget twice is no fault
            if state is not None:
                self._vacate(state)
        for new in step.new_requests:
            assert new.request_id not in self._states, f"request {new.request_id} is known already"
            self._states[new.request_id] = new_state(new, self.vocab_size, self.grammars)
        for request_id in step.plan.preempted:
            self._vacate(self._states[request_id])
        for admission in step.plan.admitted:
            state = self._states[admission.request_id]
            assert state.seat is None, f"request {state.request_id} runs already"
            last_token = int(state.tokens(state.num_tokens - 1, state.num_tokens)[0])
            state.seat = self.seats.take(state.num_tokens, last_token)
        for grant in step.plan.granted:
            seat = self._states[grant.request_id].seat
            assert seat is not None, f"blocks for request {grant.request_id}, which does not run"
            self.seats.append_blocks(seat, grant.block_ids)

    def finish_step(self, rows: Sequence[RowOutput]) -> None:
        """Appends the sampled tokens; a failed row's request gets none and will be ended."""
        for row in rows:
            if row.token_id is not None:
                state = self._states[row.request_id]
                state.add_output(row.token_id)
                assert state.seat is not None
                self.seats.last_token_S[state.seat] = row.token_id
                self.seats.num_tokens_S[state.seat] = state.num_tokens

    def _vacate(self, state: RequestState) -> None:
        if state.seat is not None:
            self.seats.release(state.seat)
            state.seat = None


def new_state(new: NewRequest, vocab_size: int, grammars: GrammarTable) -> RequestState:
    """The state of a request that arrives; one that cannot be sampled keeps the reason instead.

    The plan counts on its tokens, so its rows are computed like any other's, with token 0 for those
    that are not in the vocabulary, and fail when they are sampled.
    """
    prompt = np.array(unpack_tokens(new.token_ids), np.int32)
    try:
        outside = prompt[(prompt < 0) | (prompt >= vocab_size)]
        check_token_ids("prompt", outside[:1].tolist(), vocab_size)
        if isinstance(new.pooling, Score):
            labels = [new.pooling.negative, new.pooling.positive]
            check_token_ids("labels", labels, vocab_size)
        matcher = None if new.grammar is None else grammars.matcher(new.grammar)
        rule = SamplingRule(new.sampling, prompt.tolist(), vocab_size, matcher)
    except (ValueError, OverflowError) as error:
        valid = np.where((prompt < 0) | (prompt >= vocab_size), 0, prompt)
        reason = f"invalid request: {error}"
        return RequestState(new.request_id, valid, None, reason, new.pooling)
    return RequestState(new.request_id, prompt, rule, pooling=new.pooling)
