"""`cearx chat`: a conversation in the terminal with a running server, or with one it starts.

Owns the conversation and the keyboard: Ctrl-C stops an answer, Ctrl-D or /exit ends the program.
With input from a pipe every line is a turn and nothing but the answers is printed. Called by the
command line.
"""

import argparse
import contextlib
import io
import math
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import httpx
from rich.console import Console

from cearx.frontend.chat_connection import (
    DEFAULT_URL,
    READ_TIMEOUT_S,
    ChatError,
    ServerFailed,
    answers,
    base_url,
    first_model,
    started_server,
    stream_answer,
    wait_ready,
)

EXIT_WORDS = ("/exit", "/quit")
# A model's words may hold escape sequences; a terminal must not obey them.
_CONTROL_CHARACTERS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})


class OutputLost(Exception):
    """Nobody takes the answers any more: a closed pipe or a full disk."""


def main(argv: list[str]) -> int:
    """Exit code 0 at the end, 1 when a piped turn failed, 2 when there is no server."""
    options = _parse(argv)
    if sys.stdin is None or sys.stdout is None:
        raise SystemExit("cearx chat: standard input and output must be open")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text must not end the chat
    console = Console(stderr=True, highlight=False)
    signal.signal(signal.SIGTERM, _end)
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=5.0)
    with httpx.Client(base_url=options.url, timeout=timeout) as http:
        try:
            with _server(http, options, console) as model:
                return Conversation(http, options, model, console).run()
        except ServerFailed as error:
            return error.exit_code or 2
        except ChatError as error:
            console.print(f"cearx chat: {error}", style="red", markup=False)
            return 2
        except OutputLost as error:
            console.print(f"cearx chat: {error}", style="red", markup=False)
            return 1
        except KeyboardInterrupt:  # before the first turn
            return 130


def _end(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(143)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cearx chat",
        description="Chat with a running server, or with one that it starts. Ctrl-C stops an"
        " answer, Ctrl-D or /exit ends the chat.",
    )
    parser.add_argument(
        "--url", type=base_url, default=DEFAULT_URL, help="server to talk to (%(default)s)"
    )
    parser.add_argument(
        "--model", type=_text, help="name of the model (default: the first that is served)"
    )
    parser.add_argument("--system", type=_text, help="system message")
    parser.add_argument("--temperature", type=_number, help="0 for the most likely words")
    parser.add_argument("--max-tokens", type=int, help="longest answer")
    return parser.parse_args(argv)


def _text(argument: str) -> str:
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{argument!r} is not valid UTF-8") from None
    return argument


def _number(argument: str) -> float:
    number = float(argument)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {argument}")
    return number


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more when the interpreter ends.
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
        raise OutputLost(f"the answer cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _server(http: httpx.Client, options: argparse.Namespace, console: Console) -> Iterator[str]:
    """The name of the model, with a server that answers for the time of the block."""
    with contextlib.ExitStack() as stack:
        if answers(http):
            wait_ready(http)
        elif options.url == DEFAULT_URL:
            console.print(f"nothing answers at {DEFAULT_URL}, starting a server", style="dim")
            stack.enter_context(started_server(http, options.model))
        else:
            raise ChatError(f"nothing answers at {options.url}")
        yield options.model or first_model(http)


class Conversation:
    """The turns so far and the way to the next."""

    def __init__(
        self, http: httpx.Client, options: argparse.Namespace, model: str, console: Console
    ) -> None:
        self._http = http
        self._console = console
        self._is_interactive = sys.stdin.isatty()
        self._messages: list[dict[str, str]] = []
        if options.system:
            self._messages.append({"role": "system", "content": options.system})
        self._parameters: dict[str, Any] = {"model": model, "stream": True}
        if options.temperature is not None:
            self._parameters["temperature"] = options.temperature
        if options.max_tokens is not None:
            self._parameters["max_tokens"] = options.max_tokens

    def run(self) -> int:
        if self._is_interactive:
            hint = "Ctrl-C stops an answer, Ctrl-D or /exit ends."
            self._console.print(f"{self._parameters['model']}. {hint}", style="dim", markup=False)
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - importing it gives `input` editing and history
        has_failed = False
        for words in self._turns():
            try:
                self._answer(words)
            except ChatError as error:
                has_failed = True
                self._console.print(str(error), style="red", markup=False)
        return int(has_failed and not self._is_interactive)

    def _turns(self) -> Iterator[str]:
        while True:
            try:
                words = self._read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._console.print()
                continue
            if words in EXIT_WORDS:
                return
            if words:
                yield words

    def _read(self) -> str:
        """One line; raises EOFError at the end."""
        if self._is_interactive:
            return input("> ")
        line = sys.stdin.readline()  # `input` would write to standard output
        if not line:
            raise EOFError
        return line

    def _answer(self, words: str) -> None:
        """One turn; a turn without any answer is forgotten, a stopped one is remembered."""
        turn = {"role": "user", "content": words}
        request = {**self._parameters, "messages": [*self._messages, turn]}
        pieces: list[str] = []
        try:
            with contextlib.closing(stream_answer(self._http, request)) as stream:
                for piece in stream:
                    pieces.append(piece)
                    _write(piece.translate(_CONTROL_CHARACTERS))
        except KeyboardInterrupt:
            self._console.print(" (stopped)", style="dim", end="")
        finally:
            if pieces:
                answer = {"role": "assistant", "content": "".join(pieces)}
                self._messages += [turn, answer]
                _write("\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
