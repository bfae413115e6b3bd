"""A stream's pieces join to the whole body, and both to what an independent search says."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_core import Reply, logprob_of
from frontend_server import FrontendServer, frontend_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cearx.core.events import FinishReason
from cearx.core.messages import Submit

PIECES = st.sampled_from(
    [
        "a",
        "b",
        "ab",
        " ",
        "\n",
        "é",
        "e\u0301",
        "你好",
        "日",
        "한",
        "😀",
        "👩‍👧",
        "\U0001f1e9",
        '"',
        "\\",
    ]
)
TEXTS = st.lists(PIECES, min_size=1, max_size=12).map("".join)
STOPS = st.lists(st.lists(PIECES, min_size=1, max_size=2).map("".join), max_size=3, unique=True)
SPLITS = st.lists(st.integers(1, 5), max_size=4)
PATHS = st.sampled_from(["/v1/chat/completions", "/v1/completions"])


@pytest.fixture(scope="module", params=[1, 3, 16])
def server(request: pytest.FixtureRequest) -> Iterator[FrontendServer]:
    with frontend_server(stream_interval=request.param) as started:
        yield started


def script(text: str, cut: int, splits: list[int], ends: FinishReason) -> Any:
    """Each choice (told apart by its seed) says the text rotated, and may end in mid-character."""

    def reply(submit: Submit) -> Reply:
        turn = submit.sampling.seed % len(text)
        data = (text[turn:] + text[:turn]).encode()
        token_ids = list(data[: max(1, len(data) - cut)])
        if ends is FinishReason.STOP:
            token_ids.append(256)
        wants_logprobs = submit.sampling.num_logprobs is not None
        logprobs = [logprob_of(i, t) for i, t in enumerate(token_ids)] if wants_logprobs else None
        return Reply(token_ids=token_ids, finish_reason=ends, splits=splits, logprobs=logprobs)

    return reply


def expected(
    token_ids: list[int], stops: list[str], include_stop: bool, min_tokens: int
) -> tuple[str, str | int | None, int]:
    """Text, stop_reason and number of tokens, by trying every number of tokens."""
    data = bytes(t for t in token_ids if t < 256)
    skipped = len(data[:min_tokens].decode("utf-8", "ignore"))
    text = data.decode("utf-8", "replace")
    for end in range(skipped + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[skipped:end].endswith(stop):
                kept = text[: end if include_stop else end - len(stop)]
                num_tokens = next(
                    n
                    for n in range(len(data) + 1)
                    if len(data[:n].decode("utf-8", "ignore")) >= end
                )
                return kept, stop, num_tokens
    return text, None, len(token_ids)


def text_of(choice: dict[str, Any]) -> str:
    if "message" in choice:
        return str(choice["message"]["content"])
    if "delta" in choice:
        return str(choice["delta"].get("content", ""))
    return str(choice["text"])


def logprob_rows(choice: dict[str, Any]) -> list[Any]:
    found = choice["logprobs"]
    if found is None:
        return []
    if "content" in found:
        return list(found["content"])
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(found[name] for name in columns), strict=True))


@settings(
    max_examples=70, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    path=PATHS,
    text=TEXTS,
    cut=st.integers(0, 3),
    splits=SPLITS,
    stops=STOPS,
    n=st.integers(1, 3),
    ends=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 6),
    logprobs=st.booleans(),
)
def test_stream_joins_to_the_body(
    server: FrontendServer,
    path: str,
    text: str,
    cut: int,
    splits: list[int],
    stops: list[str],
    n: int,
    ends: FinishReason,
    include_stop: bool,
    min_tokens: int,
    logprobs: bool,
) -> None:
    """Text, log-probabilities, reasons and usage agree between stream, body and oracle."""
    server.core.reply = reply = script(text, cut, splits, ends)
    fields: dict[str, Any] = {
        "n": n,
        "seed": 11,
        "max_tokens": 100,
        "stop": stops,
        "include_stop_str_in_output": include_stop,
        "min_tokens": min_tokens,
    }
    if "chat" in path:
        fields |= {"messages": [{"role": "user", "content": "x"}], "logprobs": logprobs}
        fields |= {"top_logprobs": 2} if logprobs else {}
    else:
        fields |= {"prompt": "x", "logprobs": 2 if logprobs else None}
    first_submit = len(server.core.submits)
    body = server.post(path, **fields).json()
    events = server.events(path, stream_options={"include_usage": True}, **fields)
    replies = [reply(s).token_ids for s in server.core.submits[first_submit : first_submit + n]]

    assert [e["choices"] == [] for e in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["usage"] == body["usage"]
    assert all(e["usage"] is None for e in events[:-1])
    total = 0
    for index, choice in enumerate(body["choices"]):
        mine = [c for e in events for c in e["choices"] if c["index"] == index]
        assert "".join(map(text_of, mine)) == text_of(choice)
        assert [row for c in mine for row in logprob_rows(c)] == logprob_rows(choice)
        reasons = [c["finish_reason"] for c in mine]
        assert reasons == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if "chat" in path:
            assert ["role" in c["delta"] for c in mine] == [True] + [False] * (len(mine) - 1)

        ended_at_eos = ends is FinishReason.STOP
        visible = replies[index]
        wanted, stop_reason, num_tokens = expected(visible, stops, include_stop, min_tokens)
        total += num_tokens
        assert text_of(choice) == wanted
        assert choice["stop_reason"] == stop_reason
        is_stop = stop_reason is not None or ended_at_eos
        assert choice["finish_reason"] == ("stop" if is_stop else "length")
        assert len(logprob_rows(choice)) == (num_tokens if logprobs else 0)
    assert body["usage"]["completion_tokens"] == total


def test_an_event_holds_at_most_stream_interval_tokens() -> None:
    """With outputs of one token, no event of a stream has more tokens than asked, none is lost."""
    for interval in (1, 3):
        with frontend_server(stream_interval=interval) as server:
            events = server.events("/v1/completions", prompt="abcdefg", max_tokens=50)
            pieces = [e["choices"][0]["text"] for e in events]
            assert "".join(pieces) == ("abcdefg" * 8)[:50]
            assert max(map(len, pieces)) <= interval
