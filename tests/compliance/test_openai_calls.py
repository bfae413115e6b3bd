"""40 calls of the official openai client, each answer checked by strict validation and content."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from server_process import Server

pytestmark = pytest.mark.model

HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
RESPONSE_TOOL = {"type": "function", "strict": True, **FUNCTION}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}


class City(BaseModel):
    kind: Literal["city", "village"]
    big: bool


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="-", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def calls_of(answer: Any) -> list[Any]:
    return list(answer.choices[0].message.tool_calls)


CHATS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "plain": ({}, lambda a: "Paris" in text_of(a)),
    "system": ({"messages": [{"role": "system", "content": "Be brief."}, *HELLO]}, text_of),
    "developer": ({"messages": [{"role": "developer", "content": "Be brief."}, *HELLO]}, text_of),
    "turns": (
        {"messages": [*HELLO, {"role": "assistant", "content": "Paris."}, *HELLO]},
        lambda a: a.usage.prompt_tokens == 57,
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say yes."}]}]},
        text_of,
    ),
    "choices": ({"n": 3, "temperature": 1, "seed": 1}, lambda a: len(a.choices) == 3),
    "stop": (
        {"stop": ["Paris"]},
        lambda a: a.choices[0].finish_reason == "stop" and "Paris" not in text_of(a),
    ),
    "logprobs": (
        {"logprobs": True, "top_logprobs": 3},
        lambda a: [len(t.top_logprobs) for t in a.choices[0].logprobs.content] == [3] * 8,
    ),
    "logit_bias": ({"logit_bias": {"42": 100}}, lambda a: len(set(text_of(a))) == 1),
    "limit": ({"max_completion_tokens": 3}, lambda a: a.usage.completion_tokens == 3),
    "penalties": ({"presence_penalty": 1, "frequency_penalty": 0.5}, text_of),
    "hints": ({"user": "u", "metadata": {"a": "b"}, "store": False}, text_of),
    "effort": ({"reasoning_effort": "low"}, text_of),
    "extensions": ({"extra_body": {"top_k": 1, "min_p": 0.1, "ignore_eos": True}}, text_of),
    "json_object": (
        {"response_format": {"type": "json_object"}},
        lambda a: text_of(a).startswith("{"),
    ),
    "json_schema": (
        {"response_format": FORMAT, "max_tokens": 80},
        lambda a: a.choices[0].finish_reason == "stop" and '"city"' in text_of(a),
    ),
    "required": (
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120},
        lambda a: calls_of(a)[0].function.name == "get_weather",
    ),
    "named": (
        {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 80},
        lambda a: '"city"' in calls_of(a)[0].function.arguments,
    ),
    "result": (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
            ]
        },
        text_of,
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_chat(client: openai.OpenAI, server: Server, name: str) -> None:
    """One whole answer of the chat route."""
    fields, is_right = CHATS[name]
    answer = client.chat.completions.create(
        **{"model": server.name, "messages": HELLO, **SHORT, **fields}
    )
    assert is_right(answer), answer


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"logprobs": True},
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120},
    ],
    ids=lambda v: "-".join(v) or "plain",
)
def test_chat_streams(client: openai.OpenAI, server: Server, fields: dict[str, Any]) -> None:
    """The client's own helper joins the chunks to the whole answer."""
    asked: dict[str, Any] = {"model": server.name, "messages": HELLO, **SHORT, **fields}
    with client.chat.completions.stream(**asked) as stream:
        joined = stream.get_final_completion()
    choice = joined.choices[0]
    assert choice.message.content or choice.message.tool_calls
    assert choice.finish_reason == ("tool_calls" if "tools" in fields else "stop")
    assert (joined.usage is not None) == ("stream_options" in fields)


def test_parse(client: openai.OpenAI, server: Server) -> None:
    """A pydantic class as response_format."""
    answer = client.chat.completions.parse(
        model=server.name, messages=HELLO, temperature=0, max_tokens=60, response_format=City
    )
    assert isinstance(answer.choices[0].message.parsed, City)


COMPLETIONS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "plain": ({}, lambda a: a.choices[0].text),
    "several": ({"prompt": ["One", "Two"], "n": 2}, lambda a: len(a.choices) == 4),
    "ids": ({"prompt": [504, 253]}, lambda a: a.usage.prompt_tokens == 2),
    "echo": (
        {"echo": True, "max_tokens": 1},
        lambda a: a.choices[0].text.startswith("The capital of France is"),
    ),
    "stop": ({"stop": ["."], "max_tokens": 30}, lambda a: "." not in a.choices[0].text),
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(client: openai.OpenAI, server: Server, name: str) -> None:
    """One whole answer of the completions route."""
    fields, is_right = COMPLETIONS[name]
    asked = {"model": server.name, "prompt": "The capital of France is", **SHORT, **fields}
    assert is_right(client.completions.create(**asked))


RESPONSES: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "plain": ({}, lambda a: "Paris" in a.output_text),
    "instructions": ({"instructions": "Be brief."}, lambda a: a.instructions == "Be brief."),
    "items": ({"input": HELLO}, lambda a: a.status == "completed"),
    "schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        lambda a: a.status == "completed" and '"city"' in a.output_text,
    ),
    "tool": (
        {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "get_weather"}},
        lambda a: a.output[0].type == "function_call",
    ),
    "logprobs": (
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        lambda a: "".join(t.token for t in a.output[0].content[0].logprobs) == a.output_text,
    ),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(client: openai.OpenAI, server: Server, name: str) -> None:
    """One whole answer of the responses route."""
    fields, is_right = RESPONSES[name]
    limit = 80 if name in ("schema", "tool") else 16
    answer = client.responses.create(
        **{
            "model": server.name,
            "input": HELLO[0]["content"],
            "temperature": 0,
            "max_output_tokens": limit,
            **fields,
        }
    )
    assert is_right(answer), answer


def test_responses_stream(client: openai.OpenAI, server: Server) -> None:
    """The helper joins the events."""
    asked: Any = {"model": server.name, "input": HELLO, "temperature": 0}
    with client.responses.stream(**asked) as stream:
        assert "Paris" in stream.get_final_response().output_text


def test_models(client: openai.OpenAI, server: Server) -> None:
    """The list has the model, which can be asked for by its name."""
    assert [model.id for model in client.models.list()] == [server.name]
    assert client.models.retrieve(server.name).id == server.name


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
    ],
)
def test_errors(client: openai.OpenAI, server: Server, fields: Any, kind: Any, param: str) -> None:
    """They are the exceptions that programs catch."""
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": server.name, "messages": HELLO, **fields})
    assert caught.value.param == param
