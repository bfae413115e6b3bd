"""Tools and reasoning through the API: the official client, streams against bodies, usage."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from fake_core import Reply
from frontend_server import ENGINE, MODEL, FrontendServer, frontend_server
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
)

from cearx.core.events import FinishReason
from cearx.core.messages import unpack_tokens
from cearx.frontend.chat_template import ChatTemplate
from cearx.frontend.parser_choice import choose_tool_parser, has_reasoning
from cearx.frontend.tool_parsers import HermesParser

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> write <tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} of {{ c.function.arguments.city }}]"
    "{% endfor %}{% endfor %}<assistant>{% if enable_thinking is false %}<think></think>"
    "{% elif enable_thinking %}<think>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Genève"}}\n</tool_call>'
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "weather?"}]


@pytest.fixture(scope="module", params=[1, 3, 100])
def server(request: pytest.FixtureRequest) -> Iterator[FrontendServer]:
    engine = msgspec.structs.replace(ENGINE, max_model_len=4096, num_blocks=1024)
    with frontend_server(engine, stream_interval=request.param) as started:
        started.state.chat_template = ChatTemplate(TEMPLATE, None, None)
        started.state.make_tool_parser = HermesParser
        started.state.splits_reasoning = True
        yield started


@pytest.fixture(scope="module")
def client(server: FrontendServer) -> Iterator[openai.OpenAI]:
    url = server.url + "/v1"
    with openai.OpenAI(
        base_url=url, api_key="-", max_retries=0, timeout=10, _strict_response_validation=True
    ) as made:
        yield made


def says(server: FrontendServer, text: str, splits: list[int] | None = None) -> None:
    reply = Reply(
        token_ids=[*text.encode(), 256], finish_reason=FinishReason.STOP, splits=splits or []
    )
    server.core.reply = lambda submit: reply


def prompt_of(server: FrontendServer) -> str:
    return bytes(list(unpack_tokens(server.core.submits[-1].token_ids))).decode()


def test_a_conversation_with_a_tool(server: FrontendServer, client: openai.OpenAI) -> None:
    """The model sees the tools, its call comes back typed, and the next turn shows both."""
    says(server, f"I look.\n{CALL}")
    answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL])
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Genève"}
    assert '"description": "of a city"' in prompt_of(server)

    says(server, "Sunny.")
    result: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": call.id, "content": "22"}
    said: Any = choice.message.model_dump(exclude_none=True)
    answer = client.chat.completions.create(
        model=MODEL, messages=[*ASK, said, result], tools=[TOOL]
    )
    assert "<assistant>I look.[weather of Genève]<tool>22" in prompt_of(server)
    assert answer.choices[0].message.content == "Sunny."
    assert answer.choices[0].finish_reason == "stop"


def test_a_streamed_call(server: FrontendServer, client: openai.OpenAI) -> None:
    """The stream helper puts two parallel calls together; no delta is empty."""
    says(server, f"{CALL}\n{CALL}")
    with client.chat.completions.stream(model=MODEL, messages=ASK, tools=[TOOL]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert not message.content
    assert message.tool_calls is not None and len(message.tool_calls) == 2
    assert len({call.id for call in message.tool_calls}) == 2
    assert [call.function.parsed_arguments for call in message.tool_calls] == [None, None]
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
        {"city": "Genève"}
    ] * 2
    events = server.events(
        "/v1/chat/completions", model=MODEL, messages=ASK, tools=[TOOL], parallel_tool_calls=False
    )
    deltas = [c["delta"] for e in events for c in e["choices"]]
    assert {call["index"] for d in deltas for call in d.get("tool_calls", [])} == {0}
    assert all(d != {} for d in deltas[:-1])


def test_choice_none_shows_no_tools(server: FrontendServer, client: openai.OpenAI) -> None:
    """The model does not see them, and what it writes is content."""
    says(server, CALL)
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice="none"
    )
    assert "<tools>" not in prompt_of(server)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")


@pytest.mark.parametrize(
    ("kwargs", "text", "reasoning", "content", "num_tokens"),
    [
        ({}, "<think>so</think>yes", "so", "yes", 10),
        ({"enable_thinking": True}, "so</think>yes", "so", "yes", 10),
        ({"enable_thinking": False}, "yes", None, "yes", 0),
    ],
)
def test_reasoning(
    server: FrontendServer,
    kwargs: dict[str, Any],
    text: str,
    reasoning: str | None,
    content: str,
    num_tokens: int,
) -> None:
    """What the template opened counts, whatever the flag; every token of the thought is told."""
    says(server, text)
    fields = {"model": MODEL, "messages": ASK, "chat_template_kwargs": kwargs}
    body = server.post("/v1/chat/completions", **fields).json()
    message = body["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens


def test_a_call_that_max_tokens_cuts(server: FrontendServer) -> None:
    """Finish reason length, the arguments as far as they came, and the stream's end."""
    text = CALL[: CALL.index("Gen") + 3]
    reply = Reply(token_ids=[*text.encode()], finish_reason=FinishReason.LENGTH)
    server.core.reply = lambda submit: reply
    events = server.events("/v1/chat/completions", model=MODEL, messages=ASK, tools=[TOOL])
    [last] = events[-1]["choices"]
    assert last["finish_reason"] == "length"
    calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(c["function"]["arguments"] for c in calls) == '{"city": "Gen'


PIECES = st.sampled_from(
    ["<think>", "</think>", CALL, "<tool_call>", "</tool_call>", "a", " ", "\n", "é", "{", '"x"']
)


@settings(max_examples=40)
@given(
    text=st.lists(PIECES, min_size=1, max_size=8).map("".join),
    splits=st.lists(st.integers(1, 9), max_size=3),
    stop=st.sampled_from([None, "a", '"}}']),
)
def test_stream_joins_to_the_body(
    server: FrontendServer, text: str, splits: list[int], stop: str | None
) -> None:
    """Reasoning, content, calls, reasons and usage are the same in both."""
    says(server, text, splits)
    fields: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": [TOOL], "stop": stop}
    body = server.post("/v1/chat/completions", **fields).json()
    events = server.events("/v1/chat/completions", stream_options={"include_usage": True}, **fields)
    assert events[-1]["usage"] == body["usage"]
    chunks = [e["choices"][0] for e in events[:-1]]
    message = body["choices"][0]["message"]
    deltas = [chunk["delta"] for chunk in chunks]
    for name in ("content", "reasoning_content"):
        assert "".join(d.get(name) or "" for d in deltas) == (message.get(name) or "")
    calls: list[dict[str, str]] = []
    for delta in deltas:
        for piece in delta.get("tool_calls", []):
            if piece["index"] == len(calls):
                assert piece["type"] == "function" and piece["id"]
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    assert calls == [call["function"] for call in message.get("tool_calls", [])]
    reasons = [chunk["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [body["choices"][0]["finish_reason"]]
    assert ["role" in d for d in deltas] == [True] + [False] * (len(deltas) - 1)


OTHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "post",
        "parameters": {
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/where"}},
            "required": ["to"],
            "$defs": {"where": {"enum": ["here", "there"]}},
        },
    },
}


def test_a_named_tool(server: FrontendServer, client: openai.OpenAI) -> None:
    """The answer is made to be the arguments; it ends by stop, as with OpenAI."""
    says(server, '{"city": "Ulm"}')
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=[TOOL, OTHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Ulm"}')
    grammar = server.core.submits[-1].grammar
    assert grammar is not None and "city" in grammar and "post" not in grammar


def test_a_required_call(server: FrontendServer, client: openai.OpenAI) -> None:
    """The answer is made to be a list of calls of any tool, streamed as calls."""
    says(server, '[{"name": "post", "parameters": {"to": "here"}}]')
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[TOOL, OTHER], tool_choice="required"
    ) as stream:
        [choice] = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("post", {"to": "here"})
    grammar = server.core.submits[-1].grammar
    assert grammar is not None and "there" in grammar and "weather" in grammar


def test_a_template_that_knows_no_tools(server: FrontendServer, client: openai.OpenAI) -> None:
    """A call that is forced is explained before the conversation, once; a free one is not."""
    named: Any = {"type": "function", "function": {"name": "post"}}
    fields: Any = {"model": MODEL, "messages": ASK, "tools": [TOOL, OTHER]}
    says(server, "[]")
    client.chat.completions.create(**fields, tool_choice="required")
    assert "You can call" not in prompt_of(server)
    template = server.state.chat_template
    server.state.chat_template = ChatTemplate(TEMPLATE.replace("tools", "toolbox"), None, None)
    try:
        for choice, is_told in (("required", True), (named, True), ("auto", False)):
            client.chat.completions.create(**fields, tool_choice=choice)
            prompt = prompt_of(server)
            assert prompt.startswith("<user>You can call") is is_told
            assert prompt.endswith("weather?<assistant>") and prompt.count("weather?") == 1
            assert ("of a city" in prompt) is (choice == "required")
            assert ('"there"' in prompt) is is_told
    finally:
        server.state.chat_template = template


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "json_object"}}, "tool_choice", "response_format"),
        ({"ignore_eos": True}, "tools", "ignore_eos"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": 5}}}]},
            "tools",
            "tools",
        ),
    ],
)
def test_what_a_forced_call_cannot_be_combined_with(
    server: FrontendServer, fields: dict[str, Any], param: str, word: str
) -> None:
    """400 that names both."""
    fields = {"messages": ASK, "tools": [TOOL], "tool_choice": "required", **fields}
    answer = server.post("/v1/chat/completions", **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and word in error["message"]


def test_parsers_from_flags_and_templates() -> None:
    """auto looks at the template, a name goes before it, none switches off."""
    template = ChatTemplate(TEMPLATE, None, None)
    assert choose_tool_parser("auto", template) is HermesParser
    assert choose_tool_parser("auto", None) is None
    assert choose_tool_parser("none", template) is None
    assert choose_tool_parser("hermes", None) is HermesParser
    assert has_reasoning("auto", template) and has_reasoning("qwen3", None)
    assert not has_reasoning("none", template) and not has_reasoning("auto", None)
