"""Lets a request's grammar be tried in another process before the engine hears of the request.

Owns the processes (`grammar_check.py`), their time limit, and what is known of grammars that were
tried. So a bad grammar is a 400, and one that is too expensive costs its sender a few seconds and
nobody else anything. Called by both routes; use inside the event loop.
"""

import asyncio
import contextlib
import hashlib
import signal
import sys
from collections import OrderedDict

import msgspec
import structlog
from anyio import CancelScope, move_on_after, to_thread

from cearx.core.grammar import pack_vocabulary
from cearx.core.messages import Vocabulary
from cearx.frontend.engine_client import EngineClient
from cearx.frontend.errors import (
    RETRY_AFTER_S,
    ApiError,
    invalid,
    not_supported,
    unavailable,
)
from cearx.frontend.grammar_check import FRAME, Check, Setup, Verdict, frame
from cearx.frontend.structured_output import Constraint
from cearx.frontend.tokenizer import Tokenizer

MAX_PROCESSES = 2
TIME_LIMIT_S = 20.0
"""For one grammar on a busy machine; the process itself counts its CPU time and ends sooner."""
START_LIMIT_S = 30.0
END_LIMIT_S = 1.0
TRIES = 2
"""A process that was killed from outside says nothing of its grammar, unless it happens again."""
MAX_VERDICTS = 1024
"""Grammars of which is remembered what came out."""

TOO_EXPENSIVE = "it takes too much time, memory or nesting"

log = structlog.get_logger()


class _Process:
    """One checking process between its start and its end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, setup: Setup) -> "_Process":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "cearx.frontend.grammar_check",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        started = cls(process)
        try:
            await started.ask(setup, START_LIMIT_S)
        except BaseException:
            await started.end()
            raise
        return started

    async def ask(self, message: Setup | Check, limit_s: float) -> str | None:
        """The verdict's error; raises TimeoutError, and EOFError or OSError when it has died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        async with asyncio.timeout(limit_s):
            self._process.stdin.write(frame(message))
            await self._process.stdin.drain()
            (size,) = FRAME.unpack(await self._process.stdout.readexactly(FRAME.size))
            body = await self._process.stdout.readexactly(size)
        return msgspec.msgpack.decode(body, type=Verdict).error

    async def was_killed(self) -> bool:
        """Whether somebody else has ended it; the limits that it sets itself end it otherwise."""
        with move_on_after(END_LIMIT_S):
            return await self._process.wait() == -signal.SIGKILL
        return False

    async def end(self) -> None:
        """Kills it and waits until it is gone, even when the caller's task is cancelled."""
        assert self._process.stdin is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with CancelScope(shield=True):
            self._process.stdin.close()
            await self._process.wait()


class GrammarChecker:
    """Of one frontend. Starts nothing before the first grammar comes."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._setup: Setup | None = None
        self._setting_up = asyncio.Lock()
        self._slots = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[_Process] = []
        self._trying: set[CancelScope] = set()
        self._is_closed = False
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    async def check(self, constraint: Constraint) -> None:
        """Raises ApiError: 400 for a grammar that cannot be used, 503 without an engine."""
        setup = await self._ready()
        digest = hashlib.sha256(constraint.grammar.encode()).digest()
        if digest in self._verdicts:
            self._verdicts.move_to_end(digest)
        else:
            self._verdicts[digest] = await self._try_until_closed(setup, constraint.grammar)
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        error = self._verdicts[digest]
        if error is not None:
            raise invalid(constraint.param, f"{constraint.param} cannot be used: {error}")

    async def prepare(self) -> None:
        """Lets the engine build its tables before somebody needs them; call when it is ready."""
        with contextlib.suppress(ApiError):  # without an end there will be no grammar
            await self._ready()

    async def close(self) -> None:
        """Ends the processes; who waits for one gets a 503."""
        self._is_closed = True
        for scope in self._trying:
            scope.cancel()
        while self._idle:
            await self._idle.pop().end()

    async def _ready(self) -> Setup:
        """Tells the engine and the processes of the vocabulary, once."""
        engine = self._client.require_ready()
        ends = [i for i in self._eos_token_ids if i < engine.vocab_size]
        if not ends:
            message = "Structured output needs a token that ends it, and this model has none"
            raise not_supported("response_format", message)
        async with self._setting_up:
            if self._setup is None:
                vocabulary = await to_thread.run_sync(vocabulary_of, self._tokenizer, tuple(ends))
                self._client.send_vocabulary(vocabulary)
                self._setup = Setup(vocabulary=vocabulary, vocab_size=engine.vocab_size)
        return self._setup

    async def _try_until_closed(self, setup: Setup, grammar: str) -> str | None:
        if not self._is_closed:
            with CancelScope() as scope:
                self._trying.add(scope)
                try:
                    async with self._slots:
                        return await self._try(setup, grammar)
                finally:
                    self._trying.discard(scope)
        raise unavailable("The server is shutting down", "shutting_down")

    async def _try(self, setup: Setup, grammar: str) -> str | None:
        """What is wrong with a grammar, or None."""
        for _ in range(TRIES):
            process = self._idle.pop() if self._idle else await _start(setup)
            is_whole = False
            try:
                error = await process.ask(Check(grammar=grammar), TIME_LIMIT_S)
                is_whole = True
                return error
            except (TimeoutError, EOFError, OSError) as error:
                log.warning("a grammar could not be checked", reason=type(error).__name__)
                if isinstance(error, TimeoutError) or not await process.was_killed():
                    break
            finally:
                if is_whole:
                    self._idle.append(process)
                else:  # it is dead, or nobody knows what it will say next
                    await process.end()
        return TOO_EXPENSIVE


async def _start(setup: Setup) -> _Process:
    """Raises ApiError (503) for what is no grammar's fault."""
    for _ in range(TRIES):
        try:
            return await _Process.start(setup)
        except (TimeoutError, EOFError, OSError) as error:
            log.warning("no process can check grammars", reason=type(error).__name__)
    raise unavailable("Grammars cannot be checked now", "grammar_check_unavailable", RETRY_AFTER_S)


def vocabulary_of(tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """All of its tokens as bytes; takes some 50 ms for 50,000 of them."""
    ids = range(tokenizer.vocab_size)
    return pack_vocabulary(
        [tokenizer.token_bytes(i) for i in ids],
        [i for i in ids if tokenizer.is_special(i)],
        eos_token_ids,
    )
