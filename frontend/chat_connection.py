"""The server that a terminal chat talks to: found, or started as a child, and its stream of text.

Speaks HTTP only, like any other client, so that the chat works against every OpenAI server. Owns
the child that it started and ends it. Called by `chat.py`.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import msgspec

DEFAULT_URL = "http://127.0.0.1:8000"
PROBE_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 600.0
"""Longest silence within an answer: a long prompt may wait and compute for minutes."""
END_TIMEOUT_S = 15.0


class ChatError(Exception):
    """What went wrong, in one line for the person."""


class ServerFailed(ChatError):
    """The server that was started has ended; it has said why itself."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the server ended with exit code {exit_code}")
        self.exit_code = exit_code


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    """A chunk of an answer, or an error."""

    choices: list[_Choice] = []
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_decode_event = msgspec.json.Decoder(_Event).decode


def base_url(argument: str) -> str:
    """A server's address without the API's own path: `host:8000` and `http://host:8000/v1` too."""
    url = argument if "://" in argument else f"http://{argument}"
    return url.rstrip("/").removesuffix("/v1")


def answers(http: httpx.Client) -> bool:
    """Whether anything speaks HTTP there, ready or not."""
    try:
        http.get("/health", timeout=PROBE_TIMEOUT_S)
    except (httpx.TransportError, UnicodeError):  # the latter for what can be no host name
        return False
    return True


@contextlib.contextmanager
def started_server(http: httpx.Client, model: str | None) -> Iterator[None]:
    """Runs `cearx serve` for the time of the block; raises ServerFailed when it does not come up.

    Its own session keeps Ctrl-C from it; what it prints is shown to the person.
    """
    command = [sys.executable, "-P", "-m", "cearx.core.cli", "serve"]
    process = subprocess.Popen(
        [*command, model] if model else command, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        while not _is_ready(http):
            try:
                raise ServerFailed(process.wait(0.1))
            except subprocess.TimeoutExpired:
                continue
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(http: httpx.Client) -> None:
    """For a server that is still starting; other servers may have no /health at all."""
    while http.get("/health", timeout=PROBE_TIMEOUT_S).status_code == 503:
        time.sleep(0.2)


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/health", timeout=PROBE_TIMEOUT_S).is_success
    except httpx.TransportError:
        return False


def first_model(http: httpx.Client) -> str:
    """The name of the model that is served; raises ChatError when there is none."""
    try:
        answer = http.get("/v1/models", timeout=PROBE_TIMEOUT_S).raise_for_status()
        models = msgspec.json.decode(answer.content, type=_Models).data
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        raise ChatError(f"{http.base_url} does not list its models: {error}") from error
    if not models:
        raise ChatError(f"{http.base_url} serves no model")
    return models[0].id


def stream_answer(http: httpx.Client, request: dict[str, Any]) -> Generator[str, None, None]:
    """The pieces of the answer's text; closing the iterator stops the answer.

    Raises ChatError for whatever the server says instead of an answer.
    """
    try:
        with http.stream("POST", "/v1/chat/completions", json=request) as response:
            if not response.is_success:
                raise ChatError(_error_message(response.status_code, response.read()))
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = _decode_event(line.removeprefix("data: ").encode())
                if event.error is not None:
                    raise ChatError(event.error.message)
                for choice in event.choices:
                    if choice.delta.content:
                        yield choice.delta.content
    except httpx.HTTPError as error:
        raise ChatError(f"the connection to {http.base_url} failed: {error}") from error
    except msgspec.DecodeError as error:
        raise ChatError(f"{http.base_url} sent something that is no answer: {error}") from error


def _error_message(status: int, body: bytes) -> str:
    with contextlib.suppress(msgspec.DecodeError):
        event = _decode_event(body)
        if event.error is not None:
            return event.error.message
    return f"the server answered with HTTP status {status}"
