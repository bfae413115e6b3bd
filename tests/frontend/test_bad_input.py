"""What a client may not send: each with its status, the field it is blamed on and the limit."""

import http.client
import re
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from frontend_server import ENGINE, FrontendServer, frontend_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cearx.frontend.errors import shown
from cearx.frontend.openai_types import ChatCompletionRequest, CompletionRequest
from cearx.frontend.request_fields import UNBUILT

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendServer]:
    with frontend_server(max_body_bytes=200_000) as started:
        yield started


@pytest.fixture(autouse=True)
def nothing_reaches_the_core(server: FrontendServer) -> Iterator[None]:
    before = len(server.core.submits)
    yield
    assert len(server.core.submits) == before
    assert server.post(TEXT, prompt="a", max_tokens=1).status_code == 200


def check_error(body: bytes, param: str | None, *needles: str) -> dict[str, Any]:
    """The error object, whole and free of anything internal."""
    error = msgspec.json.decode(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    for needle in needles:
        assert needle in error["message"], error
    assert not re.search(r"0x[0-9a-f]{8,}|Traceback|cearx\.", error["message"])
    assert error["message"].isprintable()
    return dict(error)


VALUES = [
    # field, value, what the message must name
    ("temperature", -0.1, ["-0.1", ">= 0.0"]),
    ("temperature", 2.5, ["2.5", "<= 2.0"]),
    ("temperature", "hot\x00\x1b", ['"hot\\u0000\\u001b"', "float"]),
    ("temperature", True, ["true", "float"]),
    ("top_p", 0, ["0", "> 0.0"]),
    ("top_p", 1.01, ["1.01", "<= 1.0"]),
    ("top_k", -2, ["-2", ">= -1"]),
    ("top_k", 2**40, [str(2**40), "<= 2147483647"]),
    ("top_k", 1.5, ["1.5", "int"]),
    ("min_p", 1.5, ["1.5", "<= 1.0"]),
    ("n", 0, ["0", ">= 1"]),
    ("n", 129, ["129", "<= 128"]),
    ("n", 10**400, ["1000", "<= 128"]),
    ("max_tokens", 0, ["0", ">= 1"]),
    ("max_tokens", -1, ["-1", ">= "]),
    ("max_tokens", "many", ['"many"', "int"]),
    ("min_tokens", -1, ["-1", ">= 0"]),
    ("min_tokens", 50, ["50", "20", "max_tokens"]),
    ("seed", 2**63, [str(2**63), str(2**63 - 1)]),
    ("seed", "x", ['"x"', "int"]),
    ("stop", ["a", "b", "c", "d", "e"], ["<= 4"]),
    ("stop", "", ['""', ">= 1"]),
    ("stop", "x" * 257, ["xxx", "<= 256"]),
    ("stop", 7, ["7", "str"]),
    ("stop_token_ids", [0] * 129, ["<= 128"]),
    ("repetition_penalty", 0, ["0", ">= 0.01"]),
    ("repetition_penalty", 1e-38, ["1e-38", ">= 0.01"]),
    ("repetition_penalty", 11, ["11", "<= 10.0"]),
    ("presence_penalty", 2.1, ["2.1", "<= 2.0"]),
    ("frequency_penalty", -2.1, ["-2.1", ">= -2.0"]),
    ("logit_bias", {"258": 1}, ['"258"', "258 tokens"]),
    ("logit_bias", {"-1": 1}, ['"-1"', "258 tokens"]),
    ("logit_bias", {"two": 1}, ['"two"', "258 tokens"]),
    ("logit_bias", {"²": 1}, ['"²"', "258 tokens"]),
    ("logit_bias", {"1" * 5000: 1}, ["1111", "258 tokens"]),
    ("logit_bias", {"1": 101}, ["101", "100.0"]),
    ("logit_bias", {"1": 10**400}, ["1000", "100.0"]),
    ("logit_bias", {"1": "x"}, ['"x"', "100.0"]),
    ("logit_bias", {"1": True}, ["true", "100.0"]),
    ("logit_bias", {str(i): 1 for i in range(1025)}, ["<= 1024"]),
    ("logit_bias", [1], ["[1]", "object"]),
    ("stream", "yes", ['"yes"', "bool"]),
    ("stream_options", {"include_usage": True}, ["stream", "null"]),
    ("cache_salt", "", ['""', ">= 1"]),
    ("cache_salt", "s" * 129, ["<= 128"]),
    ("user", 5, ["5", "str"]),
    ("metadata", "x", ['"x"', "object"]),
    ("ignore_eos", 1, ["1", "bool"]),
    ("skip_special_tokens", "no", ['"no"', "bool"]),
    ("prompt_logprobs", -1, ["-1", ">= 0"]),
    ("prompt_logprobs", 21, ["21", "20"]),
    ("truncate_prompt_tokens", 0, ["0", "at least 1"]),
    ("truncate_prompt_tokens", -2, ["-2", ">= -1"]),
    ("truncation_side", "middle", ['"middle"', "enum"]),
    ("allowed_token_ids", [], ["[]", ">= 1"]),
    ("bad_words", ["x"] * 129, ["<= 128"]),
    ("request_id", "", ['""', ">= 1"]),
    ("return_token_ids", 1, ["1", "bool"]),
    # known elsewhere, not built here
    ("best_of", 2, ["not supported", "1", "2"]),
    ("use_beam_search", True, ["not supported"]),
    ("priority", 3, ["not supported", "0", "3"]),
    ("kv_transfer_params", {}, ["not supported"]),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("field", "value", "needles"), VALUES, ids=lambda v: str(v)[:20])
def test_fields_of_both_routes(
    server: FrontendServer, path: str, field: str, value: object, needles: list[str]
) -> None:
    """400 that names the field, the value and the limit."""
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hi"}
    answer = server.post(path, **{"max_tokens": 20, **prompt, field: value})
    assert answer.status_code == 400, answer.text
    check_error(answer.content, field, *needles)


CASES: list[tuple[str, dict[str, Any], str, list[str]]] = [
    (CHAT, {}, "messages", ["required"]),
    (CHAT, {"messages": []}, "messages", ["[]", ">= 1"]),
    (CHAT, {"messages": HELLO * 4097}, "messages", ["<= 4096"]),
    (CHAT, {"messages": "hi"}, "messages", ['"hi"', "array"]),
    (CHAT, {"messages": [5]}, "messages[0]", ["5", "object"]),
    (CHAT, {"messages": [{}]}, "messages[0].role", ["required"]),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", ["required"]),
    (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", ['"boss"']),
    (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", ['["user"]']),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", ["5", "text"]),
    (CHAT, {"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]", ["1"]),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
     "messages[1].tool_calls[0]", ["{}", "function call"]),
    (CHAT, {"messages": [{"role": "user", "content": "", "tool_calls": [{}]}]},
     "messages[0].tool_calls", ["assistant", "user"]),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type", ["image_url", "not supported"]),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
     "messages[0].content[0].text", ["1", "text"]),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name", ["1"]),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", ["logprobs", "null"]),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "20"]),
    (CHAT, {"messages": HELLO, "logprobs": 3}, "logprobs", ["3", "bool"]),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens", ["0", ">= 1"]),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function",
     ["required"]),
    (CHAT, {"messages": HELLO, "tools": [TOOL]}, "tool_choice", ["--tool-call-parser"]),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice", ["needs tools"]),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice",
     ["perhaps"]),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "function",
     "function": {"name": "g"}}}, "tool_choice", ["g"]),
    (TEXT, {"prompt": "a", "tools": [TOOL]}, "tools", ["not supported"]),
    (CHAT, {"messages": HELLO, "modalities": ["text", "audio"]}, "modalities", ["not supported"]),
    (CHAT, {"messages": HELLO, "reasoning_effort": "hard"}, "reasoning_effort", ["hard"]),
    (TEXT, {"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort", ["not supported"]),
    (CHAT, {"messages": HELLO, "web_search_options": {}}, "web_search_options", ["not supported"]),
    (CHAT, {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message", ["both", "true"]),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "  "}],
            "continue_final_message": True}, "messages", ["empty"]),
    (CHAT, {"messages": HELLO, "echo": True}, "echo", ["continue_final_message", "false"]),
    (CHAT, {"messages": HELLO, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs",
     ["stream", "true"]),
    (CHAT, {"messages": HELLO, "allowed_token_ids": [3, 258]}, "allowed_token_ids[1]",
     ["258", "258 tokens"]),
    (CHAT, {"messages": HELLO, "bad_words": ["x", " "]}, "bad_words[1]", ['" "']),
    (CHAT, {"messages": HELLO, "bad_words": ["x"], "allowed_token_ids": [1], "ignore_eos": True},
     "allowed_token_ids", ["ignore_eos", "bad_words"]),
    (CHAT, {"messages": HELLO, "chat_template": "x"}, "chat_template", ["not supported"]),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tools": "x"}}, "chat_template_kwargs",
     ["tools", "enable_thinking"]),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"thinking": [1]}}, "chat_template_kwargs",
     ["[1]"]),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"thinking": "x" * 300}},
     "chat_template_kwargs.thinking", ["256", "300"]),
    (CHAT, {"messages": HELLO, "stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation", ["not supported"]),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages",
     ["318 tokens", "256"]),
    (TEXT, {}, "prompt", ["required"]),
    (TEXT, {"prompt": None}, "prompt", ["null"]),
    (TEXT, {"prompt": 5}, "prompt", ["5"]),
    (TEXT, {"prompt": ""}, "prompt", ["at least one token", "0"]),
    (TEXT, {"prompt": []}, "prompt", ["at least one token", "0"]),
    (TEXT, {"prompt": ["a", ""]}, "prompt[1]", ["at least one token"]),
    (TEXT, {"prompt": ["a"] * 1025}, "prompt", ["1024", "1025"]),
    (TEXT, {"prompt": ["a"] * 9, "n": 128}, "n", ["1024", "9", "128"]),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens", ["0", ">= 1", "echo"]),
    (TEXT, {"prompt": ["a" * 250] * 700, "echo": True, "logprobs": 8}, "prompt",
     ["1048576", "1575000"]),
    (TEXT, {"prompt": [[]]}, "prompt[0]", ["at least one token"]),
    (TEXT, {"prompt": [1, 258]}, "prompt[1]", ["258", "258 tokens"]),
    (TEXT, {"prompt": [-1]}, "prompt[0]", ["-1", "258 tokens"]),
    (TEXT, {"prompt": [1, 2**40]}, "prompt[1]", [str(2**40)]),
    (TEXT, {"prompt": [1, True]}, "prompt[1]", ["true"]),
    (TEXT, {"prompt": [1.5]}, "prompt[0]", ["1.5"]),
    (TEXT, {"prompt": ["a", 5]}, "prompt[1]", ["5"]),
    (TEXT, {"prompt": [[1], ["a"]]}, "prompt[1][0]", ['"a"']),
    (TEXT, {"prompt": [1] * 256}, "prompt", ["256 tokens"]),
    (TEXT, {"prompt": ["a", "b" * 400]}, "prompt[1]", ["400 tokens", "256"]),
    (TEXT, {"prompt": "a", "stop_token_ids": [258]}, "stop_token_ids[0]", ["258", "258 tokens"]),
    (TEXT, {"prompt": "a", "stop_token_ids": [10**400]}, "stop_token_ids[0]", ["1000", "258"]),
    (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs", ["21", "20"]),
    (TEXT, {"prompt": "a", "logprobs": -1}, "logprobs", ["-1", ">= 0"]),
    (TEXT, {"prompt": "a", "logprobs": True}, "logprobs", ["true", "int"]),
    (TEXT, {"prompt": "a", "suffix": "x"}, "suffix", ["not supported"]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "needles"), CASES, ids=lambda v: str(v)[:40])
def test_fields_of_one_route(
    server: FrontendServer, path: str, fields: dict[str, Any], param: str, needles: list[str]
) -> None:
    """400 that names the field, the value and the limit."""
    answer = server.post(path, **fields)
    assert answer.status_code == 400, answer.text
    check_error(answer.content, param, *needles)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"nope", "invalid_json"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_json"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b"[" * 50_000, "invalid_json"),
        (b'{"model":"test/byte-model","prompt":' + b"[" * 900 + b"]" * 900 + b"}", "invalid_type"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_bodies_that_are_no_json_object(server: FrontendServer, body: bytes, code: str) -> None:
    """400 for whatever cannot be read as an object, and the server goes on."""
    answer = server.http.post(TEXT, content=body)
    assert answer.status_code == 400
    error = msgspec.json.decode(answer.content)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)


def test_a_body_with_too_many_fields(server: FrontendServer) -> None:
    """The number of fields is bounded, known or not."""
    answer = server.post(TEXT, **{f"field{i}": i for i in range(256)})
    assert answer.status_code == 400
    check_error(answer.content, None, "256", "257")


def test_unknown_model(server: FrontendServer) -> None:
    """404 with OpenAI's code, on every route that takes a model."""
    for answer in (
        server.post(CHAT, model="gpt-4", messages=HELLO),
        server.post(TEXT, model="gpt-4", prompt="a"),
        server.http.get("/v1/models/gpt-4"),
    ):
        assert answer.status_code == 404
        error = check_error(answer.content, "model", '"gpt-4"', "test/byte-model")
        assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", CHAT, 405, "POST"),
        ("DELETE", TEXT, 405, "POST"),
        ("POST", "/v1/models", 405, "GET, HEAD"),
        ("POST", "/health", 405, "GET, HEAD"),
        ("GET", "/v1/nothing", 404, None),
        ("POST", "/v1/chat/completions/", 404, None),
        ("GET", "/%0d%0ax", 404, None),
        ("BREW", "/health", 405, "GET, HEAD"),
    ],
)
def test_unknown_routes_and_methods(
    server: FrontendServer, method: str, path: str, status: int, allow: str | None
) -> None:
    """404 and 405 are error objects too, and 405 says what is allowed."""
    answer = server.http.request(method, path)
    assert answer.status_code == status
    check_error(answer.content, None, method)
    assert answer.headers.get("allow") == allow


def test_a_body_over_the_limit(server: FrontendServer) -> None:
    """413 by Content-Length, before the body is read, and the client gets to read the answer."""
    answer = server.http.post(TEXT, content=b" " * 3_000_000)
    assert answer.status_code == 413
    check_error(answer.content, None, "200000", "3000000")


def test_a_client_that_sends_on_after_413(server: FrontendServer) -> None:
    """The answer comes before the rest of the body, and sending on breaks nothing."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\n\r\n"
        )
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.status == 413
        check_error(response.read(), None, "20000000")
        for _ in range(200):
            client.sendall(b" " * 100_000)


def test_a_body_over_the_limit_without_a_length(server: FrontendServer) -> None:
    """413 by counting, when the length is not announced."""

    def chunks() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 10_000

    answer = server.http.post(TEXT, content=chunks())
    assert answer.status_code == 413
    check_error(answer.content, None, "200000")


def test_a_body_of_exactly_the_limit(server: FrontendServer) -> None:
    """The limit itself is allowed."""
    body = b'{"prompt": [1, 999]}'
    answer = server.http.post(TEXT, content=body.ljust(200_000))
    assert answer.status_code == 400
    assert server.http.post(TEXT, content=body.ljust(200_001)).status_code == 413


def test_a_lying_content_length(server: FrontendServer) -> None:
    """A request that ends before its announced length gets 400 at most and does no harm."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n{}")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000)[:12] in (b"", b"HTTP/1.1 400")
    for length in (b"abc", b"-5", b"1, 2"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %s\r\n\r\n"
            client.sendall(head % length)
            response = http.client.HTTPResponse(client)
            response.begin()
            assert response.status == 400


def test_headers_over_the_limit(server: FrontendServer) -> None:
    """A head that is not complete after 16 KiB is refused by the HTTP parser."""
    answer = server.http.get("/health", headers={"x-long": "x" * 200_000})
    assert answer.status_code == 431


def test_limits_of_the_pool() -> None:
    """A context longer than the whole KV pool is not promised to anybody."""
    engine = msgspec.structs.replace(ENGINE, num_blocks=2, max_model_len=100)
    with frontend_server(engine) as small:
        assert small.http.get("/v1/models").json()["data"][0]["max_model_len"] == 32
        answer = small.post(TEXT, prompt="x" * 32)
        assert answer.status_code == 400
        check_error(answer.content, "prompt", "32 tokens", "context")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = sorted(
    {*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *UNBUILT}
)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[FrontendServer]:
    with frontend_server() as started:
        yield started


@given(
    path=st.sampled_from([CHAT, TEXT]),
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    message=JSON,
)
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_json_gets_an_answer(
    fuzzed: FrontendServer, path: str, fields: dict[str, Any], message: Any
) -> None:
    """Whatever is in the fields: success, or an error object that is not the server's fault."""
    body = {"prompt": "a", "messages": [{"role": "user", "content": message}], **fields}
    answer = fuzzed.post(path, **body)
    if answer.status_code == 200:
        return
    assert answer.status_code in (400, 404), answer.text
    error = msgspec.json.decode(answer.content)["error"]
    assert error["type"] == "invalid_request_error" and error["message"].isprintable()


def test_a_name_that_does_not_print_is_escaped(server: FrontendServer) -> None:
    """A client's own field names stand in messages and in param."""
    body = {"prompt": "a", "structured_outputs": {"\x1f": 1}}
    error = server.post(TEXT, **body).json()["error"]
    assert error["param"] == "structured_outputs.\\u001f"
    assert error["message"].startswith("structured_outputs.\\u001f is not supported")


def test_a_value_nested_as_deeply_as_json_allows_can_be_shown() -> None:
    """An error about a value must not fail at the value, wherever on the stack it is made."""
    depth = 1
    while True:
        try:
            value = msgspec.json.decode("[" * depth + "]" * depth)
        except RecursionError:
            break
        depth += 1

        def deeper(levels: int, value: object = value) -> str:
            return deeper(levels - 1, value) if levels else shown(value)

        assert deeper(50)
    assert depth > 100
