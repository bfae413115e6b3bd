"""A core for tests of the frontend: real sockets and messages, scripted tokens, no model."""

import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec
import zmq

from cearx.core.child import endpoint
from cearx.core.events import CancelReason, FinishReason, PrefixCacheEmptied
from cearx.core.identifiers import RequestKey
from cearx.core.link import Channel, configure
from cearx.core.messages import (
    AbortLabels,
    Cancel,
    CoreToFrontend,
    EngineMetrics,
    EngineReady,
    FrontendToCore,
    Output,
    Pooling,
    PrefixCacheWasReset,
    ReadMetrics,
    Refused,
    ResetPrefixCache,
    Score,
    StepOutputs,
    Submit,
    TokenLogprobs,
    Vocabulary,
    unpack_tokens,
)
from cearx.core.metrics import Counters, EngineLoad, Histograms
from cearx.core.step_outputs import prompt_output


class Reply(msgspec.Struct, kw_only=True):
    """What the engine produces for one request."""

    token_ids: list[int]
    finish_reason: FinishReason = FinishReason.LENGTH
    stop_token_id: int | None = None
    splits: list[int] = []
    """Tokens in each output, repeated as needed; one each when empty."""
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    vector: bytes | None = None
    """In place of tokens."""


class _Running(msgspec.Struct, kw_only=True):
    reply: Reply
    prompt_logprobs: list[TokenLogprobs] = []
    """Told in two parts: the first half alone, the rest with the first token."""
    has_told_half: bool = False
    position: int = 0
    num_outputs: int = 0


def echo(submit: Submit) -> Reply:
    """The prompt's tokens, over and over, max_tokens of them; or `vector_of` it."""
    prompt = list(unpack_tokens(submit.token_ids))
    if submit.pooling is not None:
        return Reply(token_ids=[], vector=vector_of(submit.pooling, prompt))
    repeated = prompt * (submit.max_tokens // len(prompt) + 1)
    return Reply(token_ids=repeated[: submit.max_tokens])


def vector_of(pooling: Pooling, prompt: list[int]) -> bytes:
    """A score that grows with the last digit of a text; or numbers that tell prompts apart."""
    if isinstance(pooling, Score):
        digits = [token_id - ord("0") for token_id in prompt if 48 <= token_id < 58]
        return array("f", [digits[-1] / 10 if digits else 0.0]).tobytes()
    numbers = [len(prompt), prompt[0], prompt[-1], *range(5)][: pooling.dimensions]
    return array("f", [number / 8 for number in numbers]).tobytes()


def logprob_of(position: int, token_id: int) -> TokenLogprobs:
    """Different at every position; the sampled token is the second most likely one."""
    logprob = -(position + 1) / 8
    return TokenLogprobs(logprob=logprob, rank=2, top=((255, -0.125), (token_id, logprob)))


def prompt_logprobs_of(submit: Submit) -> list[TokenLogprobs]:
    """What the engine tells of a prompt that asks for it: told apart by position and token."""
    if submit.sampling.num_prompt_logprobs is None:
        return []
    top = tuple((i, -1.0 - i) for i in range(submit.sampling.num_prompt_logprobs))
    return [
        TokenLogprobs(logprob=-(token_id + index / 1000), rank=100 + index, top=top)
        for index, token_id in enumerate(unpack_tokens(submit.token_ids))
    ][1:]


class FakeCore:
    """Runs in a thread inside `with`; every step brings an output to each running request."""

    def __init__(self, runtime_dir: Path, boot_id: int, engine: EngineReady) -> None:
        self.reply: Callable[[Submit], Reply | Refused] = echo
        self.step_s = 0.0
        self.is_paused = False
        """While set, no step is made."""
        self.submits: list[Submit] = []
        self.cancels: list[tuple[RequestKey, CancelReason]] = []
        self.answers_hello = True
        self.most_running = 0
        self.num_resets = 0
        self.vocabularies: list[Vocabulary] = []
        self.answers_metrics = True
        self.counters = Counters()
        self.histograms = Histograms.empty(engine.max_model_len)
        self.load = EngineLoad(
            num_running=0, num_waiting=0, num_deferred=0, num_free_blocks=engine.num_blocks
        )
        self._engine = engine
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket)
        self._socket.bind(endpoint(runtime_dir, "frontends"))
        self._channel: Channel[CoreToFrontend, FrontendToCore] = Channel(boot_id, 0, FrontendToCore)
        self._peer = b""
        self._running: dict[RequestKey, _Running] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-core")

    def __enter__(self) -> "FakeCore":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.die()

    def die(self) -> None:
        """Closes the socket, as the end of the core's process does."""
        self._ends.set()
        self._thread.join()
        self._socket.close(0)
        self._context.destroy(linger=0)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def wait_until(self, condition: Callable[["FakeCore"], bool], timeout_s: float = 5.0) -> None:
        give_up = time.monotonic() + timeout_s
        while not condition(self):
            assert time.monotonic() < give_up, "the condition did not come true"
            time.sleep(0.002)

    def _run(self) -> None:
        while not self._ends.is_set():
            is_busy = bool(self._running) and not self.is_paused
            if self._socket.poll(0 if is_busy else 5):
                frames = self._socket.recv_multipart()
                message = self._channel.decode(frames[1])
                assert message is not None, f"a frame that does not decode: {frames}"
                self._take(frames[0], message)
            elif is_busy:
                self._step()
                time.sleep(self.step_s)

    def _send(self, message: CoreToFrontend) -> None:
        # A frontend that ended while it was answered is no fault, as for the real core.
        try:
            self._socket.send_multipart((self._peer, self._channel.encode(message)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def _take(self, peer: bytes, message: FrontendToCore) -> None:
        self._peer = peer
        if isinstance(message, Submit):
            self.submits.append(message)
            reply = self.reply(message)
            if isinstance(reply, Refused):
                self._send(msgspec.structs.replace(reply, request_key=message.request_key))
            else:
                self._running[message.request_key] = _Running(
                    reply=reply, prompt_logprobs=prompt_logprobs_of(message)
                )
                self.most_running = max(self.most_running, len(self._running))
        elif isinstance(message, Cancel):
            self.cancels.append((message.request_key, message.reason))
            self._running.pop(message.request_key, None)
        elif isinstance(message, ResetPrefixCache):
            self.num_resets += 1
            outcome = PrefixCacheEmptied(num_freed=self.num_resets, num_in_use=7)
            self._send(PrefixCacheWasReset(number=message.number, outcome=outcome))
        elif isinstance(message, AbortLabels):
            self._send(message)
        elif isinstance(message, ReadMetrics):
            if self.answers_metrics:
                self._send(self._metrics(message.number))
        elif isinstance(message, Vocabulary):
            self.vocabularies.append(message)
        elif self.answers_hello:
            self._send(self._engine)

    def _metrics(self, number: int) -> EngineMetrics:
        return EngineMetrics(
            number=number, load=self.load, counters=self.counters, histograms=self.histograms
        )

    def _step(self) -> None:
        outputs = [self._advance(key, running) for key, running in self._running.items()]
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.request_key]
        self._send(StepOutputs(outputs=tuple(outputs)))

    def _advance(self, key: RequestKey, running: _Running) -> Output:
        if len(running.prompt_logprobs) > 1 and not running.has_told_half:
            running.has_told_half = True
            half = len(running.prompt_logprobs) // 2
            told, running.prompt_logprobs = (
                running.prompt_logprobs[:half],
                running.prompt_logprobs[half:],
            )
            return prompt_output(key, tuple(told))
        reply = running.reply
        splits = reply.splits or [1]
        start = running.position
        end = start + splits[running.num_outputs % len(splits)]
        is_first = running.num_outputs == 0
        running.position, running.num_outputs = end, running.num_outputs + 1
        is_last = end >= len(reply.token_ids)
        logprobs = None if reply.logprobs is None else tuple(reply.logprobs[start:end])
        return Output(
            request_key=key,
            token_ids=tuple(reply.token_ids[start:end]),
            logprobs=logprobs,
            finish_reason=reply.finish_reason if is_last else None,
            stop_token_id=reply.stop_token_id if is_last else None,
            num_cached_tokens=reply.num_cached_tokens if is_first else None,
            prompt_logprobs=tuple(running.prompt_logprobs) if is_first else (),
            vector=reply.vector,
        )
