"""What a client sees of queue limits, deadlines and priorities, and the reset of the cache."""

from collections.abc import Iterator

import msgspec
import pytest
from fake_core import Reply
from frontend_server import ENGINE, FrontendServer, frontend_server

from cearx.core.events import FinishReason, RefusalReason
from cearx.core.identifiers import RequestKey
from cearx.core.messages import Refused

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendServer]:
    engine = msgspec.structs.replace(ENGINE, has_priorities=True)
    with frontend_server(engine) as started:
        yield started


@pytest.fixture(autouse=True)
def _echo_again(server: FrontendServer) -> Iterator[None]:
    reply = server.core.reply
    yield
    server.core.reply = reply


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (RefusalReason.QUEUE_FULL, "9 requests would wait and 8 may"),
        (RefusalReason.QUEUE_TOKENS, "prompts of 9 tokens would wait and 8 may"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503(
    server: FrontendServer, reason: RefusalReason, message: str, stream: bool
) -> None:
    """With Retry-After, an OpenAI error, both sizes and the flag."""
    server.core.reply = lambda submit: Refused(
        request_key=RequestKey(0), reason=reason, num_tokens=9, limit_tokens=8
    )
    answer = server.post(TEXT, prompt="a", max_tokens=3, stream=stream)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert message in error["message"] and "--max-num-queued" in error["message"]
    assert error["code"] == "server_busy"


def test_a_deadline_is_504(server: FrontendServer) -> None:
    """Before anything was sent it is the status, afterwards the stream's last event."""
    server.core.reply = lambda submit: Reply(token_ids=[], finish_reason=FinishReason.TIMEOUT)
    answer = server.post(TEXT, prompt="a", max_tokens=3)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "request_timeout"
    assert "retry-after" not in answer.headers
    server.core.reply = lambda submit: Reply(
        token_ids=[97, 98], finish_reason=FinishReason.TIMEOUT, splits=[1, 1]
    )
    server.core.step_s = 0.2  # so that the first token is out when the deadline comes
    try:
        events = server.events(TEXT, prompt="a", max_tokens=3)
    finally:
        server.core.step_s = 0.0
    assert events[0]["choices"][0]["text"] == "a"
    assert events[-1]["error"]["code"] == "request_timeout"


def test_priorities_reach_the_core(server: FrontendServer) -> None:
    """As they are, for every choice; other servers refuse them (test_bad_input)."""
    assert server.post(TEXT, prompt=["a", "b"], max_tokens=1, priority=-7).status_code == 200
    assert [submit.priority for submit in server.core.submits[-2:]] == [-7, -7]
    assert server.post(TEXT, prompt="a", max_tokens=1).status_code == 200
    assert server.core.submits[-1].priority == 0
    assert server.post(TEXT, prompt="a", max_tokens=1, priority=2**40).status_code == 400


@pytest.mark.parametrize(
    ("fields", "is_exact"),
    [
        ({}, False),
        ({"ignore_eos": True}, True),
        ({"ignore_eos": True, "stop": "x"}, False),
        ({"ignore_eos": True, "stop_token_ids": [5]}, False),
    ],
)
def test_the_core_hears_whether_a_length_is_exact(
    server: FrontendServer, fields: dict[str, object], is_exact: bool
) -> None:
    """Only when no end-of-sequence and no stop of any kind can come first."""
    assert server.post(TEXT, prompt="a", max_tokens=1, **fields).status_code == 200
    assert server.core.submits[-1].has_exact_length is is_exact


def test_the_cache_is_reset_by_a_post(server: FrontendServer) -> None:
    """As with vLLM: POST answers 200, other methods 405; the answer says what the core did."""
    for count in (1, 2):
        answer = server.http.post("/reset_prefix_cache")
        assert answer.status_code == 200
        assert answer.json() == {"num_blocks_freed": count, "num_blocks_in_use": 7}
        assert server.core.num_resets == count
    assert server.http.get("/reset_prefix_cache").status_code == 405


def test_there_is_no_profiler_without_its_folder(server: FrontendServer) -> None:
    """404, and the flag's name."""
    for path in ("/start_profile", "/stop_profile"):
        answer = server.http.post(path)
        assert answer.status_code == 404
        assert "--profiler-dir" in answer.json()["error"]["message"]
