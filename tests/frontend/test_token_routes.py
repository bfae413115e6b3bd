"""/tokenize, /detokenize and /abort_requests beside what the generation routes do."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_core import Reply
from frontend_server import MODEL, FrontendServer, frontend_server

from cearx.core.events import CancelReason
from cearx.core.messages import unpack_tokens


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendServer]:
    with frontend_server() as started:
        yield started


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "h\u00e9llo <|end|> \U0001f600"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_the_tokens_are_those_of_a_generation(
    server: FrontendServer, path: str, fields: dict[str, Any]
) -> None:
    """What /tokenize says is what the engine gets, and /detokenize is its inverse."""
    answer = server.post("/tokenize", model=MODEL, return_token_strs=True, **fields).json()
    server.post(path, model=MODEL, max_tokens=1, **fields)
    assert answer["tokens"] == list(unpack_tokens(server.core.submits[-1].token_ids))
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    text = server.post("/detokenize", model=MODEL, tokens=answer["tokens"]).json()["prompt"]
    assert text == fields.get("prompt", "<user>hi\n<assistant>")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "bard", "content": "b"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [258]}, "tokens[0]"),
        ("/detokenize", {"tokens": [0, -1]}, "tokens[1]"),
        ("/detokenize", {}, "tokens"),
        ("/abort_requests", {"request_ids": []}, "request_ids"),
    ],
)
def test_bad_bodies(server: FrontendServer, path: str, fields: dict[str, Any], param: str) -> None:
    """400 that names the field."""
    answer = server.post(path, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_long_text_is_no_error(server: FrontendServer) -> None:
    """Whoever counts tokens wants the number, also beyond the context."""
    assert server.post("/tokenize", prompt="a" * 1000).json()["count"] == 1000


def test_large_bodies_are_read_and_worked_on_in_threads(
    server: FrontendServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the JSON nor the tokenizer of a large body runs where the streams wait for it."""
    seen: set[tuple[str, int]] = set()
    state = server.state

    def watch(owner: object, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            seen.add((name, threading.get_ident()))
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(state.parser, "parse")
    watch(state.tokenizer, "encode")
    watch(state.tokenizer, "decode")
    loop_thread: list[int] = []
    server.loop.call_soon_threadsafe(lambda: loop_thread.append(threading.get_ident()))
    assert server.post("/tokenize", prompt="a" * 50_000).json()["count"] == 50_000
    assert server.post("/detokenize", tokens=[97] * 50_000).json()["prompt"] == "a" * 50_000
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"):
        assert server.post(path, junk="a" * 50_000).status_code == 400
    assert {name for name, _ in seen} == {"parse", "encode", "decode"}
    assert loop_thread[0] not in {thread for _, thread in seen}


def test_abort_by_request_id() -> None:
    """The stream with that id ends with an error that says so; the core takes it back."""
    with frontend_server() as server:
        server.core.reply = lambda submit: Reply(token_ids=[97] * 10_000)
        server.core.step_s = 0.005
        body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 200}
        headers = {"x-request-id": "job-1"}
        url = "/v1/completions"
        with server.http.stream("POST", url, json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert server.post("/abort_requests", request_ids=["other"]).status_code == 200
            assert "choices" in next(line for line in lines if line)
            assert server.post("/abort_requests", request_ids=["job-1"]).status_code == 200
            rest = [line for line in lines if line]
        assert "request_aborted" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        server.core.wait_until(lambda core: core.num_running == 0)
        assert [reason for _, reason in server.core.cancels] == [CancelReason.DISCONNECT]
