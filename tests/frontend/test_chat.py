"""The terminal chat as a person uses it: piped, and on a real terminal with real keys."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_core import Reply
from frontend_server import FrontendServer, byte_tokenizer, frontend_server

from cearx.core.events import CancelReason
from cearx.core.messages import Submit, unpack_tokens
from cearx.frontend.chat_connection import ServerFailed, started_server

COMMAND = [sys.executable, "-P", "-m", "cearx.frontend.chat"]


@pytest.fixture
def server() -> Iterator[FrontendServer]:
    with frontend_server() as started:
        yield started


def prompts(server: FrontendServer) -> list[str]:
    return [byte_tokenizer().decode(unpack_tokens(s.token_ids)) for s in server.core.submits]


def say(text: str) -> Reply:
    return Reply(token_ids=list(text.encode()))


def run(url: str, typed: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, "--url", url, *arguments]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=20)


def test_piped_turns(server: FrontendServer) -> None:
    """Every line is a turn, only answers are printed, and the conversation is kept."""
    server.core.reply = lambda submit: say("été 😀")
    done = run(
        server.url, "one\n\n two \n/exit\nthree\n",
        "--system", "s", "--temperature", "0", "--max-tokens", "9",
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("été 😀\nété 😀\n", "", 0)
    first = "<system>s\n<user>one\n<assistant>"
    assert prompts(server) == [first, first + "été 😀\n<user>two\n<assistant>"]
    assert {(s.max_tokens, s.sampling.temperature) for s in server.core.submits} == {(9, 0.0)}


def test_a_refused_turn(server: FrontendServer) -> None:
    """The server's own words are shown, the turn is forgotten, the next one works."""
    done = run(server.url, "x" * 300 + "\nhi\n", "--max-tokens", "2")
    assert "318 tokens" in done.stderr
    assert (done.stdout, done.returncode) == ("<u\n", 1)
    assert prompts(server) == ["<user>hi\n<assistant>"]


def test_escape_sequences_of_a_model(server: FrontendServer) -> None:
    """A terminal is not told to do what a model says."""
    server.core.reply = lambda submit: say("a\x1b]0;title\x07\x9b31mb\tc\r\n")
    assert run(server.url, "hi\n").stdout == "a]0;title31mb\tc\n\n"


def test_input_that_is_no_text(server: FrontendServer) -> None:
    """Bytes that are no UTF-8 become U+FFFD; the chat goes on."""
    command = [*COMMAND, "--url", server.url, "--max-tokens", "2"]
    done = subprocess.run(command, input=b"a\xff\nb\n", capture_output=True, timeout=20)
    assert (done.stdout, done.returncode) == (b"<u\n<u\n", 0), done.stderr
    assert prompts(server)[0] == "<user>a\ufffd\n<assistant>"


@pytest.mark.parametrize(
    "arguments", [("--temperature", "nan"), ("--temperature", "inf"), ("--system", "\udcff")]
)
def test_options_that_cannot_be_sent(server: FrontendServer, arguments: tuple[str, ...]) -> None:
    """They are wrong usage and name the option."""
    done = run(server.url, "hi\n", *arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr and "Traceback" not in done.stderr


def test_output_that_nobody_takes(server: FrontendServer) -> None:
    """A full disk ends the chat with one line."""
    with open("/dev/full", "w") as full:
        command = [*COMMAND, "--url", server.url]
        done = subprocess.run(
            command, input="hi\nhi\n", stdout=full, stderr=subprocess.PIPE, text=True, timeout=20
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "cearx chat: the answer cannot be written: No space left on device"
    ]


@pytest.mark.parametrize("stream", ["<&-", ">&-"])
def test_a_closed_stream(server: FrontendServer, stream: str) -> None:
    """Without input or output there is no chat, and one line says so."""
    command = ["sh", "-c", f'exec "$@" {stream}', "sh", *COMMAND, "--url", server.url]
    done = subprocess.run(command, input="", stderr=subprocess.PIPE, text=True, timeout=20)
    assert done.returncode == 1
    assert "must be open" in done.stderr and "Traceback" not in done.stderr


def test_no_server() -> None:
    """One line and exit code 2."""
    done = run("http://127.0.0.1:9", "hi\n")
    assert done.returncode == 2
    assert done.stderr == "cearx chat: nothing answers at http://127.0.0.1:9\n"


def test_a_server_of_another_model(server: FrontendServer) -> None:
    """--model is what the server is asked for."""
    done = run(server.url, "hi\n", "--model", "other")
    assert 'The model "other" does not exist' in done.stderr
    assert done.returncode == 1


def test_the_server_that_does_not_start(tmp_path: Path) -> None:
    """A server that is started and fails ends the chat with the server's exit code."""
    with (
        httpx.Client(base_url="http://127.0.0.1:9") as http,
        pytest.raises(ServerFailed) as failed,
        started_server(http, str(tmp_path / "no-model")),
    ):
        raise AssertionError("it cannot come up")
    assert failed.value.exit_code == 2


def _take_terminal() -> None:
    """Makes standard input the terminal whose keys send signals, as a shell does for a program."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it


class Terminal:
    """The chat on a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        self._fd, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, "--url", url],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def expect(self, text: str, timeout_s: float = 10) -> None:
        """Reads until `text` is shown, and goes on behind it the next time."""
        give_up = time.monotonic() + timeout_s
        os.set_blocking(self._fd, False)
        while text not in self.shown:
            assert time.monotonic() < give_up, f"no {text!r} in {self.shown!r}"
            try:
                self.shown += os.read(self._fd, 4096).decode()
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # the other end is closed
                assert text in self.shown, f"no {text!r} in {self.shown!r}"
        self.shown = self.shown.split(text, 1)[1]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(server: FrontendServer) -> Iterator[Terminal]:
    opened = Terminal(server.url)
    yield opened
    opened.close()


def test_keys_of_a_terminal(server: FrontendServer, terminal: Terminal) -> None:
    """Ctrl-C stops the answer (and the engine's work) and not the program, Ctrl-D ends it."""

    def reply(submit: Submit) -> Reply:
        return say("endless " * 10_000 if len(server.core.submits) == 1 else "second")

    server.core.reply = reply
    server.core.step_s = 0.005
    terminal.expect("> ")
    terminal.type("hello\n")
    terminal.expect("endless end")
    terminal.type("\x03")
    terminal.expect("(stopped)")
    server.core.wait_until(lambda core: core.num_running == 0)
    assert [reason for _, reason in server.core.cancels] == [CancelReason.DISCONNECT]
    terminal.expect("> ")
    terminal.type("\x03")
    terminal.expect("> ")
    terminal.type("again\n")
    terminal.expect("second")
    terminal.expect("> ")
    assert "<assistant>endless end" in prompts(server)[1]
    terminal.type("\x04")
    assert terminal.process.wait(5) == 0


def test_sigterm_ends_the_chat(server: FrontendServer, terminal: Terminal) -> None:
    """It leaves nothing running."""
    terminal.expect("> ")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(5) == 143
