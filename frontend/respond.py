"""From the engine's outputs to the client: one event stream or one body, from the same deltas.

Owns the order of events, coalescing, usage and the end of a stream, whatever ends it. Never knows
which route it serves. Called by `generation_route.py`.
"""

from collections.abc import Iterable

import msgspec
import structlog
from starlette.types import Send

from cearx.core.events import CancelReason
from cearx.core.messages import Output
from cearx.frontend.answer_format import AnswerFormat
from cearx.frontend.choice import Choice, ChoiceDelta, join_deltas
from cearx.frontend.engine_client import EngineClient
from cearx.frontend.errors import ApiError, server_error
from cearx.frontend.http_io import send_body
from cearx.frontend.keep_alive import COMMENT, KeepAlive
from cearx.frontend.openai_types import CompletionTokensDetails, PromptTokensDetails, Usage
from cearx.frontend.request_stream import RequestStream
from cearx.frontend.request_window import EngineRequest

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

START = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}

log = structlog.get_logger()


class AnswerPlan(msgspec.Struct, kw_only=True):
    """All that it takes to answer one HTTP request."""

    requests: list[EngineRequest]
    choices: list[Choice]
    """One for each request, in order."""
    choices_per_prompt: int
    num_prompt_tokens: int
    format: AnswerFormat
    stream: bool
    stream_interval: int
    """At most so many tokens in an event."""
    keep_alive_s: float = 0
    """Silence after which a stream gets a comment; 0: never."""
    include_usage: bool
    continuous_usage: bool
    shows_cached_tokens: bool
    shows_reasoning_tokens: bool = False
    received_us: int | None = None
    """When the HTTP request had been read, on the monotonic clock."""
    label: str | None = None
    """The id by which the request may be aborted."""


class Answer:
    """The state of one answer in the making."""

    def __init__(self, plan: AnswerPlan, stream: RequestStream) -> None:
        self._plan = plan
        self._stream = stream
        self._num_cached_tokens = 0
        self._num_tokens_told = 0
        """Tokens in the events up to now; the choices may be ahead."""
        self._num_reasoning_told = 0
        self._was_shown: set[int] = set()
        self.failure: ApiError | None = None
        """Why the engine could not go on; what it computed before is told first."""

    def take(self, batch: Iterable[tuple[int, Output]]) -> list[ChoiceDelta]:
        """Turns outputs into deltas, in order; takes back requests that a stop string ended."""
        deltas = []
        for index, output in batch:
            choice = self._plan.choices[index]
            if choice.is_finished:
                continue
            if output.num_cached_tokens and index % self._plan.choices_per_prompt == 0:
                self._num_cached_tokens += output.num_cached_tokens
            try:
                deltas.append(choice.push(output))
            except ApiError as error:
                self.failure = error
                break
            if choice.met_stop_string:
                self._stream.cancel(index, CancelReason.STOP_STRING)
        return deltas

    def events(self, batch: Iterable[tuple[int, Output]]) -> bytes:
        """What has gathered, as events of at most stream_interval tokens (one output at least)."""
        gathered: dict[int, list[ChoiceDelta]] = {}
        events: list[bytes] = []
        for delta in self.take(batch):
            deltas = gathered.setdefault(delta.index, [])
            num_tokens = delta.num_tokens + sum(d.num_tokens for d in deltas)
            if deltas and num_tokens > self._plan.stream_interval:
                events.append(self._event(deltas))
                gathered[delta.index] = [delta]
            else:
                deltas.append(delta)
        events += map(self._event, gathered.values())
        return b"".join(events)

    def _event(self, deltas: list[ChoiceDelta]) -> bytes:
        delta = join_deltas(deltas)
        self._num_tokens_told += delta.num_tokens
        self._num_reasoning_told += delta.num_reasoning_tokens
        if delta.is_silent:
            return b""
        is_first = delta.index not in self._was_shown
        self._was_shown.add(delta.index)
        usage = None
        if self._plan.continuous_usage:
            usage = self._usage(self._num_tokens_told, self._num_reasoning_told)
        return self._plan.format.chunk(delta, is_first=is_first, usage=usage)

    def usage(self) -> Usage:
        """Of the whole answer so far."""
        choices = self._plan.choices
        return self._usage(
            sum(choice.num_tokens for choice in choices),
            sum(choice.num_reasoning_tokens for choice in choices),
        )

    def _usage(self, num_completion_tokens: int, num_reasoning_tokens: int) -> Usage:
        plan = self._plan
        details = None
        if plan.shows_cached_tokens:
            details = PromptTokensDetails(cached_tokens=self._num_cached_tokens)
        return Usage(
            prompt_tokens=plan.num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=plan.num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=details,
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens)
            if plan.shows_reasoning_tokens
            else None,
        )


async def respond(client: EngineClient, plan: AnswerPlan, send: Send) -> None:
    """Generates and sends the whole answer.

    Raises ApiError as long as nothing was sent; later errors become the stream's last event.
    """
    submitted = client.submit(plan.requests, plan.received_us)
    with submitted as stream, client.labels.holding(plan.label, stream):
        answer = Answer(plan, stream)
        if plan.stream:
            await _send_stream(plan, stream, answer, send)
        else:
            await _send_whole(plan, stream, answer, send)


async def _send_whole(plan: AnswerPlan, stream: RequestStream, answer: Answer, send: Send) -> None:
    deltas: list[list[ChoiceDelta]] = [[] for _ in plan.choices]
    async for batch in stream:
        for delta in answer.take(batch):
            deltas[delta.index].append(delta)
        if answer.failure is not None:
            raise answer.failure
    choices = [join_deltas(of_choice) for of_choice in deltas]
    await send_body(send, 200, plan.format.body(choices, answer.usage()))


async def _send_stream(plan: AnswerPlan, stream: RequestStream, answer: Answer, send: Send) -> None:
    has_started = False
    try:
        with KeepAlive(stream, plan.keep_alive_s) as keep_alive:
            async for batch in stream:
                events = answer.events(batch) if batch else COMMENT
                if events:
                    if not has_started:
                        has_started = True
                        await send(START)
                    keep_alive.num_sent += 1
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                if answer.failure is not None:
                    raise answer.failure
        last = plan.format.usage_chunk(answer.usage()) if plan.include_usage else b""
    except Exception as error:
        if not has_started:
            raise
        if not isinstance(error, ApiError):
            log.exception("a stream failed")
            error = server_error("Internal server error")
        last = plan.format.error_event(error)
    await send({"type": "http.response.body", "body": last + plan.format.end(), "more_body": False})
