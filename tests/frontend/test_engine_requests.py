"""What reaches the core for a valid request: prompts, hashes, limits, sampling, defaults."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fake_core import Reply, logprob_of
from frontend_server import EOS_ID, SECRET, FrontendServer, byte_tokenizer, frontend_server

from cearx.core.block_hash import prompt_hashes, root_hash
from cearx.core.events import CancelReason, FinishReason
from cearx.core.messages import SamplingParams, Submit, unpack_tokens
from cearx.frontend.generation_defaults import GenerationDefaults

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendServer]:
    with frontend_server(enable_prompt_tokens_details=True) as started:
        yield started


def submits(server: FrontendServer, path: str, **fields: Any) -> list[Submit]:
    before = len(server.core.submits)
    answer = server.post(path, **fields)
    assert answer.status_code == 200, answer.text
    return server.core.submits[before:]


def prompt_text(submit: Submit) -> str:
    return byte_tokenizer().decode(unpack_tokens(submit.token_ids), skip_special_tokens=False)


def test_a_chat_is_rendered(server: FrontendServer) -> None:
    """Roles are those of the template, parts are joined, and the answer's turn is opened."""
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    [submit] = submits(server, CHAT, messages=messages, max_tokens=1)
    opened = "<system>be brief\n<user>a\nb\n<assistant>c\n<tool>d\n<assistant>"
    assert prompt_text(submit) == opened
    [submit] = submits(server, CHAT, messages=messages, max_tokens=1, add_generation_prompt=False)
    assert prompt_text(submit) == opened.removesuffix("<assistant>")
    kwargs = {"enable_thinking": True}
    [submit] = submits(server, CHAT, messages=messages, max_tokens=1, chat_template_kwargs=kwargs)
    assert prompt_text(submit) == opened + "<think>"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hé", [[104, 195, 169]]),
        (["a", "b"], [[97], [98]]),
        ([5, 6, 257], [[5, 6, 257]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [7]], [[97], [7]]),
        ("a<|end|>", [[97, 256]]),
    ],
)
def test_forms_of_prompts(
    server: FrontendServer, prompt: object, expected: list[list[int]]
) -> None:
    """Text, ids and lists of either become one engine request each, in order."""
    found = submits(server, TEXT, prompt=prompt, max_tokens=1)
    assert [list(unpack_tokens(s.token_ids)) for s in found] == expected


def test_choices_and_seeds(server: FrontendServer) -> None:
    """n requests for each prompt; a given seed counts up, an absent one is drawn anew."""
    found = submits(server, TEXT, prompt=["a", "b"], n=3, seed=40, max_tokens=1)
    assert [(prompt_text(s), s.sampling.seed) for s in found] == [
        (prompt, seed) for prompt in "ab" for seed in (40, 41, 42)
    ]
    drawn = {submits(server, TEXT, prompt="a", max_tokens=1)[0].sampling.seed for _ in range(5)}
    assert len(drawn) == 5
    for seed in (-1, 2**63 - 1):
        found = submits(server, TEXT, prompt="a", n=2, seed=seed, max_tokens=1)
        assert all(0 <= s.sampling.seed < 2**63 for s in found)


def test_block_hashes_and_salt(server: FrontendServer) -> None:
    """Full blocks are hashed as the core does it; a salt changes the root of the chain."""
    for salt in (None, "tenant"):
        [submit] = submits(server, TEXT, prompt="x" * 40, max_tokens=1, cache_salt=salt)
        root = root_hash(SECRET, salt)
        assert submit.cache_root == root
        assert submit.block_hashes == prompt_hashes(SECRET, root, submit.token_ids, 16)
        assert len(submit.block_hashes) == 2


def test_max_tokens(server: FrontendServer) -> None:
    """Defaults are 16 and the rest of the context; what is too much is clamped to the context."""
    chat = [{"role": "user", "content": "x" * 100}]
    cases: list[tuple[str, dict[str, Any], int]] = [
        (TEXT, {"prompt": "x" * 100}, 16),
        (TEXT, {"prompt": "x" * 250}, 6),
        (TEXT, {"prompt": "x" * 255}, 1),
        (TEXT, {"prompt": "x", "min_tokens": 30}, 30),
        (TEXT, {"prompt": "x" * 100, "max_tokens": 10**30}, 156),
        (CHAT, {"messages": chat}, 256 - 118),
        (CHAT, {"messages": chat, "max_tokens": 7}, 7),
        (CHAT, {"messages": chat, "max_tokens": 7, "max_completion_tokens": 8}, 8),
    ]
    for path, fields, expected in cases:
        assert [s.max_tokens for s in submits(server, path, **fields)] == [expected]
    [submit] = submits(server, TEXT, prompt="x" * 250, min_tokens=90, max_tokens=100)
    assert (submit.max_tokens, submit.sampling.min_tokens) == (6, 6)


def test_sampling_parameters(server: FrontendServer) -> None:
    """Every field arrives where it belongs."""
    [submit] = submits(
        server, TEXT, prompt="a", max_tokens=9, temperature=0.5, top_p=0.25, top_k=-1, min_p=0.125,
        seed=3, min_tokens=2, stop_token_ids=[7, 8], repetition_penalty=1.5, presence_penalty=-1,
        frequency_penalty=2, logit_bias={"5": 1.5, "6": -100}, logprobs=4,
    )  # fmt: skip
    assert submit.sampling == SamplingParams(
        temperature=0.5, top_p=0.25, top_k=0, min_p=0.125, seed=3, min_tokens=2,
        eos_token_ids=(EOS_ID,), stop_token_ids=(7, 8), repetition_penalty=1.5,
        presence_penalty=-1.0, frequency_penalty=2.0, logit_bias=((5, 1.5), (6, -100.0)),
        num_logprobs=4,
    )  # fmt: skip
    [submit] = submits(server, TEXT, prompt="a", max_tokens=9, ignore_eos=True)
    assert submit.sampling.eos_token_ids == ()


def test_defaults_of_the_model(server: FrontendServer) -> None:
    """The publisher's recommendation holds where the request says nothing (or null)."""
    before = server.state.defaults
    server.state.defaults = GenerationDefaults(
        temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1
    )
    try:
        [submit] = submits(server, TEXT, prompt="a", max_tokens=1, temperature=None, seed=0)
        assert submit.sampling == SamplingParams(
            temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1,
            eos_token_ids=(EOS_ID,),
        )  # fmt: skip
        [submit] = submits(
            server, TEXT, prompt="a", max_tokens=1, seed=0,
            temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1,
        )  # fmt: skip
        assert submit.sampling == SamplingParams(temperature=0.0, eos_token_ids=(EOS_ID,))
    finally:
        server.state.defaults = before


def test_fields_that_change_nothing(server: FrontendServer) -> None:
    """Hints for OpenAI's fleet, and features that are asked for by nobody, are accepted."""
    fields = {
        "model": "test/byte-model", "user": "u", "metadata": {"a": "b"}, "store": True,
        "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k",
        "parallel_tool_calls": True, "tools": None, "tool_choice": "none", "functions": [],
        "response_format": {"type": "text"}, "modalities": ["text"], "best_of": 1,
        "echo": False, "priority": 0, "stream_options": None, "logprobs": False,
    }  # fmt: skip
    messages = [{"role": "user", "content": "x"}]
    assert len(submits(server, CHAT, messages=messages, max_tokens=1, **fields)) == 1


def test_unknown_fields_warn_once(server: FrontendServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that nobody knows is ignored with one line in the log; null makes no difference."""
    warned: list[str] = []

    class Log:
        def warning(self, event: str, field: str) -> None:
            warned.append(field)

    monkeypatch.setattr(server.state.parser, "_log", Log())
    for _ in range(3):
        submits(server, TEXT, prompt="a", max_tokens=1, top_a=0.5, **{"new\nline": 1})
    assert warned == ['"top_a"', '"new\\nline"']
    warned.clear()
    messages = [{"role": "user", "content": "x", "refusal": None, "mood": "good"}]
    fields = {"max_tokens": 1, "stream": True, "stream_options": {"pace": 1}}
    submits(server, CHAT, messages=messages * 2, **fields)
    assert warned == ['"stream_options.pace"', '"messages[].mood"']
    for number in range(400):
        server.post(TEXT, **{"prompt": "", f"field{number}": 1})
    assert len(warned) == 254


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses"])
def test_a_request_without_a_model(server: FrontendServer, path: str) -> None:
    """It is refused as OpenAI refuses it; --no-require-model takes it to mean the one there is."""
    body = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    body = {"input": "x"} if path == "/v1/responses" else body
    answer = server.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "model")
    assert error["code"] == "missing_required_parameter"
    with frontend_server(require_model=False) as lenient:
        for fields in ({}, {"model": None}):
            answer = lenient.http.post(path, json=body | fields)
            assert answer.json()["model"] == lenient.state.model_name, answer.text
        assert lenient.http.post(path, json=body | {"model": "gpt-4"}).status_code == 404
        aborted = lenient.http.post("/abort_requests", json={"request_ids": ["x"]})
        assert aborted.status_code == 200


def test_strict_params() -> None:
    """--strict-params turns the warning into a refusal."""
    with frontend_server(strict_params=True) as server:
        answer = server.post(TEXT, prompt="a", top_a=0.5)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("top_a", "unknown_parameter")
        assert server.post(TEXT, prompt="a", user="u").status_code == 200
        messages = [{"role": "user", "content": "x", "mood": "good"}]
        answer = server.post(CHAT, messages=messages)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[].mood")


def test_logprobs_of_broken_characters(server: FrontendServer) -> None:
    """Chat shows the bytes of a token that is no text by itself, completions make them a key."""
    token_ids = list("aé".encode())

    def reply(submit: Submit) -> Reply:
        rows = [logprob_of(i, t) for i, t in enumerate(token_ids)]
        return Reply(token_ids=token_ids, logprobs=rows)

    monkey = server.core.reply
    server.core.reply = reply
    try:
        chat = server.post(
            CHAT, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2
        ).json()["choices"][0]
        text = server.post(TEXT, prompt="x", logprobs=2).json()["choices"][0]
    finally:
        server.core.reply = monkey
    assert chat["message"]["content"] == text["text"] == "aé"
    assert chat["logprobs"]["content"][1] == {
        "token": "\ufffd",
        "logprob": -0.25,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.125, "bytes": [0xFF]},
            {"token": "\ufffd", "logprob": -0.25, "bytes": [0xC3]},
        ],
    }
    assert text["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.125, -0.25, -0.375],
        "top_logprobs": [
            {"bytes:\\xff": -0.125, "a": -0.125},
            {"bytes:\\xff": -0.125, "bytes:\\xc3": -0.25},
            {"bytes:\\xff": -0.125, "bytes:\\xa9": -0.375},
        ],
        "text_offset": [0, 1, 1],
    }


def test_a_bug_is_a_500(server: FrontendServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw is an error object without a word about the inside."""
    with monkeypatch.context() as patch:
        patch.setattr(server.state, "tokenizer", None)
        answer = server.post(TEXT, prompt="a")
    assert answer.status_code == 500
    assert answer.json() == {
        "error": {
            "message": "Internal server error",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    assert server.post(TEXT, prompt="a").status_code == 200


def test_stop_tokens_and_cached_tokens(server: FrontendServer) -> None:
    """A stop token is named, counted and not shown; cached prompt tokens are reported."""
    before = server.core.reply
    server.core.reply = lambda submit: Reply(
        token_ids=[97, 98, 99],
        finish_reason=FinishReason.STOP,
        stop_token_id=99,
        num_cached_tokens=16,
    )
    try:
        body = server.post(TEXT, prompt="x" * 20, n=2, stop_token_ids=[99]).json()
        shown = server.post(
            TEXT, prompt="x", stop_token_ids=[99], include_stop_str_in_output=True
        ).json()
    finally:
        server.core.reply = before
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", 99)
    assert body["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 6,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert shown["choices"][0]["text"] == "abc"


def test_stop_strings_wait_for_min_tokens(server: FrontendServer) -> None:
    """The text of the first min_tokens tokens is not searched, that of the next one is."""
    for min_tokens, expected in ((0, ""), (1, "ab"), (2, "ab"), (3, "abab")):
        answer = server.post(
            TEXT, prompt="ab", max_tokens=8, min_tokens=min_tokens, stop=["a"]
        ).json()["choices"][0]
        assert (answer["text"], answer["stop_reason"]) == (expected, "a")


def test_a_stop_string_ends_the_engines_work(server: FrontendServer) -> None:
    """The core is told, for that choice alone."""
    core = server.core
    before, core.step_s, first = core.reply, 0.005, len(core.submits)

    def reply(submit: Submit) -> Reply:
        return Reply(token_ids=[97] * 20 if len(core.submits) - first == 1 else [98] * 5_000)

    core.reply = reply
    try:
        answer = server.post(TEXT, prompt="x", n=2, stop=["bbb"]).json()
    finally:
        core.reply, core.step_s = before, 0.0
    assert [c["text"] for c in answer["choices"]] == ["a" * 20, ""]
    assert answer["usage"]["completion_tokens"] == 23
    core.wait_until(lambda core: core.num_running == 0)
    quick, endless = (submit.request_key for submit in core.submits[first:])
    cancelled = [cancel for cancel in core.cancels if cancel[0] >= quick]
    assert cancelled == [(endless, CancelReason.STOP_STRING)]


def test_continuous_usage(server: FrontendServer) -> None:
    """Every chunk carries the usage up to there when that is asked for."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(TEXT, prompt="abc", max_tokens=3, stream_options=options)
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 3]
    assert all(e["usage"]["prompt_tokens"] == 3 for e in events)


def test_a_stream_without_usage(server: FrontendServer) -> None:
    """Nobody gets usage who did not ask for it."""
    for options in (None, {}, {"include_usage": False}, {"continuous_usage_stats": True}):
        events = server.events(TEXT, prompt="abc", max_tokens=3, stream_options=options)
        assert all("usage" not in e and len(e["choices"]) == 1 for e in events)


def test_submits_survive_the_wire() -> None:
    """The structs that are compared here are those that msgpack brings back."""
    params = SamplingParams(logit_bias=((1, 0.5),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
