"""What answers tell of prompts: echo, token ids, log-probabilities; whole and in streams."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_core import Reply, logprob_of
from frontend_server import FrontendServer, frontend_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cearx.core.messages import Submit, unpack_tokens

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def say(text: str) -> Any:
    """An engine that always answers `text`, with log-probabilities where they are asked for."""

    def reply(submit: Submit) -> Reply:
        token_ids = list(text.encode())[: submit.max_tokens]
        wants = submit.sampling.num_logprobs is not None
        logprobs = [logprob_of(i, t) for i, t in enumerate(token_ids)] if wants else None
        return Reply(token_ids=token_ids, logprobs=logprobs, splits=[2, 1, 3])

    return reply


@pytest.fixture(scope="module", params=[1, 3, 100])
def server(request: pytest.FixtureRequest) -> Iterator[FrontendServer]:
    with frontend_server(stream_interval=request.param) as started:
        yield started


def body(server: FrontendServer, path: str, **fields: Any) -> Any:
    answer = server.post(path, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def joined(events: list[Any], index: int) -> dict[str, Any]:
    """The parts of a stream's choice put together."""
    whole: dict[str, Any] = {"text": "", "token_ids": [], "columns": [], "prompt_token_ids": None}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice.get("delta")
            whole["text"] += choice["text"] if delta is None else delta.get("content", "")
            whole["token_ids"] += choice.get("token_ids", [])
            found = choice["logprobs"]
            if found is not None and "tokens" in found:
                whole["columns"] += columns(found)
            own = choice.get("prompt_token_ids", event.get("prompt_token_ids"))
            if own is not None:
                assert whole["prompt_token_ids"] is None, "told twice"
                whole["prompt_token_ids"] = own
    return whole


def columns(logprobs: dict[str, Any]) -> list[Any]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in names), strict=True))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompts=st.lists(
        st.text(st.sampled_from("aé你😀 <\n"), min_size=1, max_size=9)
        | st.lists(st.integers(0, 257), min_size=1, max_size=9),
        min_size=1,
        max_size=2,
    ),
    n=st.integers(1, 2),
    text=st.text(st.sampled_from("xé😀"), min_size=1, max_size=6),
    echo=st.booleans(),
    logprobs=st.none() | st.integers(0, 2),
    max_tokens=st.integers(0, 20),
    ids=st.booleans(),
)
def test_stream_joins_to_the_body(
    server: FrontendServer,
    prompts: list[Any],
    n: int,
    text: str,
    echo: bool,
    logprobs: int | None,
    max_tokens: int,
    ids: bool,
) -> None:
    """Echo, ids and log-probabilities are the same in both forms, and those of the prompt."""
    server.core.reply = say(text)
    fields = {
        "prompt": prompts,
        "n": n,
        "echo": echo,
        "logprobs": logprobs,
        "max_tokens": max_tokens if echo else max(1, max_tokens),
        "return_token_ids": ids,
    }
    whole = body(server, TEXT, **fields)
    events = server.events(TEXT, **fields)
    said = list(text.encode())[: fields["max_tokens"]]
    for choice in whole["choices"]:
        prompt = prompts[choice["index"] // n]
        prompt_ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        stream = joined(events, choice["index"])
        assert stream["text"] == choice["text"]
        assert choice["finish_reason"] == "length"
        bytes_of = bytes(t for t in prompt_ids if t < 256)
        if echo:
            expected = (bytes_of + bytes(said)).decode("utf-8", "replace")
            if fields["max_tokens"] == 0:  # nothing completes a character that the prompt begins
                expected = expected.rstrip("\ufffd")
                assert choice["text"].rstrip("\ufffd") == expected
            elif isinstance(prompt, str):
                assert choice["text"] == expected
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            rows = columns(choice["logprobs"])
            assert stream["columns"] == rows
            assert len(rows) == len(said) + (len(prompt_ids) if echo else 0)
            if echo:
                assert rows[0][1:3] == (None, None)
                for index, row in enumerate(rows[1 : len(prompt_ids)], start=1):
                    assert row[1] == -(prompt_ids[index] + index / 1000)
                    assert len(row[2]) <= logprobs + 1
                assert [row[3] for row in rows] == sorted(row[3] for row in rows)
        if ids:
            assert choice["token_ids"] == stream["token_ids"] == said
            assert choice["prompt_token_ids"] == stream["prompt_token_ids"] == prompt_ids
        else:
            assert "token_ids" not in choice and "prompt_token_ids" not in choice
    assert whole["usage"]["completion_tokens"] == len(said) * n * len(prompts)


def test_prompt_logprobs(server: FrontendServer) -> None:
    """For every token but the first its candidates by id, the token itself always among them."""
    server.core.reply = say("xy")
    choice = body(server, TEXT, prompt="abc", prompt_logprobs=2, n=2, max_tokens=2)["choices"]
    assert choice[0]["prompt_logprobs"] == [
        None,
        *(
            {
                "0": {"logprob": -1.0, "rank": 1, "decoded_token": "\0"},
                "1": {"logprob": -2.0, "rank": 2, "decoded_token": "\x01"},
                str(ord(letter)): {
                    "logprob": -(ord(letter) + index / 1000),
                    "rank": 100 + index,
                    "decoded_token": letter,
                },
            }
            for index, letter in ((1, "b"), (2, "c"))
        ),
    ]
    assert "prompt_logprobs" not in choice[1]
    chat = body(server, CHAT, messages=HELLO, prompt_logprobs=0, max_tokens=1)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["prompt_logprobs"][0] is None
    assert [len(entry) for entry in chat["prompt_logprobs"][1:]] == [1] * (
        len(chat["prompt_logprobs"]) - 1
    )


def test_prompts_with_logprobs_find_no_cached_blocks(server: FrontendServer) -> None:
    """What is told of a prompt must be computed: its block hashes are like nobody's."""
    before = len(server.core.submits)
    for wanted in (None, 1, 1):
        body(server, TEXT, prompt="x" * 40, prompt_logprobs=wanted, max_tokens=1)
    body(server, TEXT, prompt="x" * 40, echo=True, logprobs=1, max_tokens=1, n=2)
    hashes = [set(s.block_hashes) for s in server.core.submits[before:]]
    assert [len(found) for found in hashes] == [2] * 5
    assert len(set.union(*hashes)) == 10


def test_a_final_message_is_continued(server: FrontendServer) -> None:
    """The prompt ends where the message does, and the answer goes on; echo gives both."""
    server.core.reply = say("yes")
    messages = [*HELLO, {"role": "assistant", "content": "I say "}]
    before = len(server.core.submits)
    fields = {"messages": messages, "continue_final_message": True, "max_tokens": 3}
    assert body(server, CHAT, **fields)["choices"][0]["message"]["content"] == "yes"
    whole = body(server, CHAT, echo=True, **fields)
    assert whole["choices"][0]["message"]["content"] == "I say yes"
    assert joined(server.events(CHAT, echo=True, **fields), 0)["text"] == "I say yes"
    for submit in server.core.submits[before:]:
        assert bytes(list(unpack_tokens(submit.token_ids))) == b"<user>hi\n<assistant>I say "


def test_token_ids_in_chat(server: FrontendServer) -> None:
    """Beside the choices for the prompt, in them for the output; absent when not asked for."""
    server.core.reply = say("yes")
    fields = {"messages": HELLO, "max_tokens": 3, "return_token_ids": True}
    whole = body(server, CHAT, **fields)
    assert whole["choices"][0]["token_ids"] == list(b"yes")
    assert whole["prompt_token_ids"] == list(b"<user>hi\n<assistant>")
    stream = joined(server.events(CHAT, **fields), 0)
    assert stream["token_ids"] == list(b"yes")
    assert stream["prompt_token_ids"] == whole["prompt_token_ids"]


def test_tokens_as_ids(server: FrontendServer) -> None:
    """Log-probabilities name tokens by id, in both forms of the API."""
    server.core.reply = say("ab")
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    found = body(server, TEXT, prompt="x", logprobs=2, **fields)["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:97", "token_id:98"]
    assert set(found["top_logprobs"][0]) == {"token_id:255", "token_id:97"}
    chat = body(server, CHAT, messages=HELLO, logprobs=True, top_logprobs=2, **fields)
    content = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["token_id:97", "token_id:98"]
    assert [entry["bytes"] for entry in content] == [[97], [98]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, "hij"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 99}, "abcdefghij"),
        ({"truncate_prompt_tokens": -1}, "abcdefghij"),
    ],
)
def test_truncated_prompts(server: FrontendServer, fields: dict[str, Any], expected: str) -> None:
    """The end is kept, or the beginning; an echo shows what was kept."""
    server.core.reply = say("!")
    for prompt in ("abcdefghij", list(b"abcdefghij")):
        whole = body(server, TEXT, prompt=prompt, echo=True, max_tokens=1, **fields)
        assert whole["choices"][0]["text"] == expected + "!"
        assert whole["usage"]["prompt_tokens"] == len(expected)


def test_truncation_to_the_context(server: FrontendServer) -> None:
    """-1 leaves room for max_tokens in a context of 256 tokens."""
    whole = body(server, TEXT, prompt="x" * 999, truncate_prompt_tokens=-1, max_tokens=100)
    assert whole["usage"]["prompt_tokens"] == 156
    assert whole["usage"]["completion_tokens"] <= 100


def test_request_ids_are_labels(server: FrontendServer) -> None:
    """They stand in the answer's id and need not differ."""
    for _ in range(2):
        assert body(server, TEXT, prompt="a", request_id="mine")["id"] == "cmpl-mine"
    assert server.events(CHAT, messages=HELLO, request_id="r 1")[0]["id"] == "chatcmpl-r 1"


def test_words_and_allowed_tokens_reach_the_engine(server: FrontendServer) -> None:
    """A word is forbidden as it begins a text and as it follows a space."""
    before = len(server.core.submits)
    body(server, TEXT, prompt="a", bad_words=["no"], allowed_token_ids=[9, 3, 3])
    sampling = server.core.submits[before].sampling
    assert sampling.bad_words == (tuple(b"no"), tuple(b" no"))
    assert sampling.allowed_token_ids == (3, 9)
