"""All that happened to one request, by the steps in which it happened.

Kept by `timeline.py`; steps are indices in its table.
"""

from array import array

import msgspec

from cearx.core.events import FinishReason, RefusalReason, RequestArrived, WaitReason
from cearx.core.identifiers import RequestId


class Admitted(msgspec.Struct, frozen=True):
    step: int
    """Index in the table of steps, as everywhere in this module."""
    num_cached_tokens: int


class Chunk(msgspec.Struct, frozen=True):
    step: int
    start: int
    num_tokens: int
    samples: bool


class Waited(msgspec.Struct):
    """Steps in a row in which the plan names the request as waiting, with one reason."""

    first_step: int
    last_step: int
    reason: WaitReason


class RequestLine(msgspec.Struct, kw_only=True):
    """All that happened to one request."""

    request_id: RequestId
    num_prompt_tokens: int
    max_tokens: int
    arrived_us: int
    arrived_step: int
    """The first step planned after its arrival."""
    admissions: list[Admitted] = msgspec.field(default_factory=list)
    preemptions: list[int] = msgspec.field(default_factory=list)
    """Steps."""
    chunks: list[Chunk] = msgspec.field(default_factory=list)
    waits: list[Waited] = msgspec.field(default_factory=list)
    """Only those that the plans name: behind them others wait for the same."""
    token_steps: "array[int]" = msgspec.field(default_factory=lambda: array("i"))
    """The step that sampled each output token."""
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Computed again after a preemption."""
    refused: RefusalReason | None = None
    ended: FinishReason | None = None
    ended_us: int | None = None
    """When it ended or was refused."""
    ended_step: int | None = None
    """The step whose tokens ended it, None when something else did."""
    lost: bool = False
    """It ended where records are missing; `ended_us` is where they begin to miss."""
    began_before: bool = False
    """It was there when the log begins, or records were missing when it came: `arrived_us` is the
    earliest time that is known of it."""
    _most_planned: int = 0

    @classmethod
    def of(cls, event: RequestArrived, step: int) -> "RequestLine":
        """It arrives before that step."""
        return cls(
            request_id=event.request_id,
            num_prompt_tokens=event.num_prompt_tokens,
            max_tokens=event.max_tokens,
            arrived_us=event.arrived_us,
            arrived_step=step,
        )

    @property
    def has_seat(self) -> bool:
        return len(self.admissions) > len(self.preemptions)

    @property
    def num_hit_tokens(self) -> int:
        """Prompt tokens that the prefix cache held at the first admission."""
        return self.admissions[0].num_cached_tokens if self.admissions else 0

    def count(self, end: int, num_tokens: int) -> None:
        """Tokens [end - num_tokens, end) are computed, maybe not for the first time."""
        self.num_computed_tokens += num_tokens
        again = min(end, self._most_planned) - (end - num_tokens)
        self.num_recomputed_tokens += max(0, again)
        self._most_planned = max(self._most_planned, end)

    def wait(self, at: int, reason: WaitReason) -> None:
        """One step more of the last wait, or the first of another."""
        last = self.waits[-1] if self.waits else None
        if last is not None and last.reason is reason and last.last_step == at - 1:
            last.last_step = at
        else:
            self.waits.append(Waited(at, at, reason))
