"""40 calls of the official anthropic client, checked by its strict validation and by content."""

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from server_process import Server

pytestmark = pytest.mark.model

HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
}
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": SCHEMA,
}
OTHER: dict[str, Any] = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
USE = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "Sunny"}
TEXT = {"type": "text", "text": "What is the weather in Paris?"}
ONE_CALL = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
ANY_CALL = {"tools": [TOOL, OTHER], "tool_choice": {"type": "any"}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="-", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def said(*turns: Any) -> dict[str, Any]:
    """A conversation in which the two take turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def text_of(answer: Any) -> str:
    return "".join(block.text for block in answer.content if block.type == "text")


def is_call(answer: Any) -> bool:
    block = answer.content[0]
    return bool(block.type == "tool_use" and block.name in ("get_weather", "get_time"))


Check = Callable[[Any], Any]
CASES: dict[str, tuple[dict[str, Any], Check]] = {
    "plain": ({}, lambda a: "Paris" in text_of(a) and a.stop_reason == "end_turn"),
    "system": ({"system": "Be brief."}, text_of),
    "system-blocks": ({"system": [{"type": "text", "text": "Be brief."}]}, text_of),
    "blocks": (said([TEXT, TEXT]), text_of),
    "turns": (said("Hi", "Hello.", "Who are you?"), text_of),
    "prefill": (said("Hi", [{"type": "text", "text": "Hello."}], [TEXT]), text_of),
    "sampling": (
        {"extra_body": {"temperature": 1.0, "top_p": 0.5, "top_k": 1}},
        lambda a: "Paris" in text_of(a),
    ),
    "thinking": ({"thinking": {"type": "disabled"}}, text_of),
    "format": (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 60},
        lambda a: '"city"' in text_of(a) and a.stop_reason == "end_turn",
    ),
    "limit": (
        {"max_tokens": 3},
        lambda a: (a.stop_reason, a.usage.output_tokens) == ("max_tokens", 3),
    ),
    "stop": (
        {"stop_sequences": ["Paris"]},
        lambda a: (a.stop_reason, a.stop_sequence) == ("stop_sequence", "Paris"),
    ),
    "hints": ({"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}}, text_of),
    "tool": ({**ONE_CALL, "max_tokens": 60}, lambda a: "city" in a.content[0].input),
    "any": ({**ANY_CALL, "max_tokens": 120}, is_call),
    "one-at-most": (
        {
            "tools": [TOOL],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 120,
        },
        lambda a: len(a.content) == 1 and a.stop_reason == "tool_use",
    ),
    "none": ({"tools": [TOOL], "tool_choice": {"type": "none"}}, text_of),
    "result": (said("Weather?", [USE], [RESULT]), text_of),
    "result-and-text": (said("Weather?", [USE], [RESULT, TEXT]), text_of),
}


def asked(server: Server, fields: dict[str, Any]) -> Any:
    """At temperature 0, which the client's own arguments cannot say."""
    plain = {"model": server.name, "messages": HELLO, "max_tokens": 10}
    return {"extra_body": {"temperature": 0}, **plain, **fields}


@pytest.mark.parametrize("name", CASES)
def test_whole(client: anthropic.Anthropic, server: Server, name: str) -> None:
    """One whole answer."""
    fields, is_right = CASES[name]
    answer = client.messages.create(**asked(server, fields))
    assert is_right(answer), answer
    assert answer.usage.input_tokens > 0


@pytest.mark.parametrize("name", CASES)
def test_streamed(client: anthropic.Anthropic, server: Server, name: str) -> None:
    """The client's own helper joins the events to the same."""
    fields, is_right = CASES[name]
    with client.messages.stream(**asked(server, fields)) as stream:
        answer = stream.get_final_message()
    assert is_right(answer), answer


def test_count_tokens(client: anthropic.Anthropic, server: Server) -> None:
    """More for a longer prompt."""
    fields: Any = {"model": server.name, "messages": HELLO}
    few = client.messages.count_tokens(**fields)
    many = client.messages.count_tokens(**fields, system="Be brief. " * 20)
    assert 0 < few.input_tokens < many.input_tokens


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "claude"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
    ],
)
def test_errors(client: anthropic.Anthropic, server: Server, fields: Any, kind: Any) -> None:
    """They are the exceptions that programs catch."""
    with pytest.raises(kind):
        client.messages.create(**asked(server, fields))
