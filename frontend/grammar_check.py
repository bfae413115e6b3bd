"""The process that tries grammars out, so that a bad one can cost no more than this process.

Owns nothing but a compiler under limits of memory and stack. A grammar that is too deep or too
large ends it, and the frontend (`grammar_checker.py`), which starts it and feeds it, starts
another. Reads frames from standard input and answers each on standard output, until the end.
"""

import os
import random
import resource
import signal
import struct
import sys
import threading
from typing import BinaryIO

import msgspec
import numpy as np

from cearx.core.grammar import COMPILE_STACK_BYTES, GrammarCompiler, GrammarError
from cearx.core.messages import Vocabulary

FRAME = struct.Struct("<I")
MEMORY_BYTES = 1024 * 1024 * 1024
"""What grammars may take beside what the process has when it is ready."""
CPU_LIMIT_S = 2.0
"""For one grammar; more ends this process. Not wall time: a busy machine is nobody's fault."""
NICENESS = 10
"""Streams go first."""
WALK_TOKENS = 24
"""Tokens that are tried behind the beginning."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first frame; answered when the process is ready."""

    vocabulary: Vocabulary
    vocab_size: int


class Check(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    grammar: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    error: str | None


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's body, None at the end."""
    head = stream.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    (size,) = FRAME.unpack(head)
    return stream.read(size)


def frame(message: Setup | Check | Verdict) -> bytes:
    """A message with its length before it."""
    body = msgspec.msgpack.encode(message)
    return FRAME.pack(len(body)) + body


def try_grammar(compiler: GrammarCompiler, grammar: str) -> None:
    """Compiles it and follows it for a few tokens, any of those it allows; raises GrammarError."""
    matcher = compiler.compile(grammar)
    choice = random.Random(0)
    for _ in range(WALK_TOKENS):
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise GrammarError("a token takes too much work")
        allowed = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
        if not len(allowed):
            raise GrammarError("no text can satisfy it")
        matcher.consume_token(int(choice.choice(allowed)))
        if matcher.is_stopped():
            return


def serve() -> None:
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    decoder = msgspec.msgpack.Decoder(Setup | Check)
    compiler: GrammarCompiler | None = None
    while (body := read_frame(stdin)) is not None:
        message = decoder.decode(body)
        error = None
        if isinstance(message, Setup):
            compiler = GrammarCompiler(message.vocabulary, message.vocab_size)
            _limit_memory()
        else:
            assert compiler is not None, "the first frame is a Setup"
            signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
            try:
                try_grammar(compiler, message.grammar)
            except GrammarError as problem:
                error = str(problem)
            signal.setitimer(signal.ITIMER_PROF, 0)
        stdout.write(frame(Verdict(error=error)))
        stdout.flush()


def _limit_memory() -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        limit = used + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    os.nice(NICENESS)
    threading.stack_size(COMPILE_STACK_BYTES // 4)
    thread = threading.Thread(target=serve, name="check")
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
