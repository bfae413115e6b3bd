"""The grammars that requests of this worker follow: compiled beside the steps, kept for a while.

Owns the thread that compiles, so that no step waits for one, and the table of compiled grammars.
Never decides who may use a grammar: the core asks for one to be prepared before it lets a request
in. Called by the process's loop (`prepare`, `finished`) and by the request states (`matcher`).
"""

import contextlib
import os
import queue
import sys
import threading
from collections import OrderedDict, deque

import llguidance
import structlog

from cearx.core.grammar import COMPILE_STACK_BYTES, GrammarCompiler, GrammarError
from cearx.core.messages import GrammarPrepared, PrepareGrammar, Vocabulary

NICENESS = 10
"""Of the thread that compiles: steps go first."""
MAX_GRAMMARS = 256
"""Compiled grammars that are kept, the least recently used one goes first."""

log = structlog.get_logger()


class GrammarTable:
    """Use from the process's own thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None
        self._matchers: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        """Of the two above, which the thread fills."""
        self._work: queue.SimpleQueue[Vocabulary | PrepareGrammar] = queue.SimpleQueue()
        self._done: deque[GrammarPrepared] = deque()
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    @property
    def wake_fd(self) -> int:
        """Readable when `finished` has answers; opened when it is first asked for."""
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[0], False)
        return self._pipe[0]

    def take(self, message: Vocabulary | PrepareGrammar) -> None:
        """Hands work to the thread, which starts with the first."""
        self._work.put(message)
        if self._thread is None:
            before = threading.stack_size(COMPILE_STACK_BYTES)
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
            threading.stack_size(before)

    def finished(self) -> list[GrammarPrepared]:
        """What was prepared since the last call, or why not."""
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], 4096)
        return [self._done.popleft() for _ in range(len(self._done))]

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher of its own at the beginning of the grammar; raises GrammarError.

        One that was forgotten since it was prepared is compiled here and now.
        """
        return self._compiled(grammar).deep_copy()

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            message = self._work.get()
            if isinstance(message, Vocabulary):
                self._set_vocabulary(message)
            else:
                self._done.append(GrammarPrepared(key=message.key, error=self._try(message)))
                if self._pipe is not None:
                    os.write(self._pipe[1], b"1")

    def _set_vocabulary(self, vocabulary: Vocabulary) -> None:
        if self._compiler is None:  # else another frontend has sent the same
            compiler = GrammarCompiler(vocabulary, self._vocab_size)
            with self._lock:
                self._compiler = compiler

    def _try(self, message: PrepareGrammar) -> str | None:
        try:
            self._compiled(message.grammar)
        except GrammarError as error:
            return str(error)
        except Exception as error:
            log.exception("compiling a grammar failed")
            return type(error).__name__
        return None

    def _compiled(self, grammar: str) -> llguidance.LLMatcher:
        with self._lock:
            compiler, found = self._compiler, self._matchers.get(grammar)
            if found is not None:
                self._matchers.move_to_end(grammar)
                return found
        if compiler is None:
            raise GrammarError("no vocabulary was sent")
        compiled = compiler.compile(grammar)
        compiled.compute_bitmask()  # the first mask builds most of the lexer's states
        if compiled.is_error():
            raise GrammarError("the first token takes too much work")
        with self._lock:
            self._matchers[grammar] = compiled
            while len(self._matchers) > MAX_GRAMMARS:
                self._matchers.popitem(last=False)
        return compiled
