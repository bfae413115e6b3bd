"""Anthropic's own client against /v1/messages: texts, thoughts, tools, streams, errors."""

from collections.abc import Iterator
from typing import Any

import anthropic
import msgspec
import pytest
from fake_core import Reply
from frontend_server import ENGINE, MODEL, FrontendServer, frontend_server

from cearx.core.events import FinishReason
from cearx.core.messages import unpack_tokens
from cearx.frontend.chat_template import ChatTemplate
from cearx.frontend.tool_parsers import HermesParser

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> write <tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} of {{ c.function.arguments.city }}]"
    "{% endfor %}{% endfor %}<assistant>{% if enable_thinking is false %}<think></think>"
    "{% elif enable_thinking %}<think>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Genève"}}\n</tool_call>'
ASK: Any = [{"role": "user", "content": [{"type": "text", "text": "weather?"}]}]
TOOLS: Any = [
    {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}},
]
TEXT = f"<think>hm, so</think>I look.\n{CALL}"


@pytest.fixture(scope="module", params=[1, 100])
def server(request: pytest.FixtureRequest) -> Iterator[FrontendServer]:
    engine = msgspec.structs.replace(ENGINE, max_model_len=4096, num_blocks=1024)
    with frontend_server(engine, stream_interval=request.param) as started:
        started.state.chat_template = ChatTemplate(TEMPLATE, None, None)
        started.state.make_tool_parser = HermesParser
        started.state.splits_reasoning = True
        yield started


@pytest.fixture(scope="module")
def client(server: FrontendServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="-", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def says(server: FrontendServer, text: str, ends: FinishReason = FinishReason.STOP) -> None:
    token_ids = [*text.encode(), *([256] if ends is FinishReason.STOP else [])]
    server.core.reply = lambda submit: Reply(token_ids=token_ids, finish_reason=ends)


def prompt_of(server: FrontendServer) -> str:
    return bytes(list(unpack_tokens(server.core.submits[-1].token_ids))).decode()


def test_blocks(server: FrontendServer, client: anthropic.Anthropic) -> None:
    """Thought, text and call, the same whole and streamed; the next turn shows them."""
    says(server, TEXT)
    fields: Any = {"model": MODEL, "max_tokens": 500, "messages": ASK, "tools": TOOLS}
    answer = client.messages.create(**fields, system="Be brief.")
    kinds = [block.type for block in answer.content]
    assert (kinds, answer.stop_reason) == (["thinking", "text", "tool_use"], "tool_use")
    call: Any = answer.content[2]
    assert (call.name, call.input) == ("weather", {"city": "Gen\u00e8ve"})
    assert answer.usage.input_tokens == len(prompt_of(server).encode())
    assert answer.usage.output_tokens == len(TEXT.encode()) + 1
    assert "<system>Be brief.<user>weather?" in prompt_of(server)

    with client.messages.stream(**fields, system="Be brief.") as stream:
        streamed = stream.get_final_message()
    for mine, whole in zip(streamed.content, answer.content, strict=True):
        assert mine.model_dump(exclude={"id", "parsed_output"}) == whole.model_dump(
            exclude={"id", "parsed_output"}
        )
    assert streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == answer.usage.output_tokens

    says(server, "Sunny.")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "22"}
    said = [block.model_dump() for block in answer.content]
    turns = [*ASK, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**{**fields, "messages": turns})
    assert "<assistant>I look.[weather of Gen\u00e8ve]<tool>22<assistant>" in prompt_of(server)
    assert answer.stop_reason == "end_turn"


def test_count_tokens(server: FrontendServer, client: anthropic.Anthropic) -> None:
    """What a message with the same prompt is counted as, and nothing is generated."""
    says(server, "Sunny.")
    fields: Any = {"model": MODEL, "messages": ASK, "tools": TOOLS, "system": "Be brief."}
    message = client.messages.create(**fields, max_tokens=5)
    before = len(server.core.submits)
    counted = client.messages.count_tokens(**fields)
    assert counted.input_tokens == message.usage.input_tokens
    assert len(server.core.submits) == before
    assert client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens < 50
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.count_tokens(model=MODEL, messages=[])
    body: Any = bad.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


def test_thoughts_are_counted(server: FrontendServer, client: anthropic.Anthropic) -> None:
    """Whole and streamed."""
    says(server, TEXT)
    fields: Any = {"model": MODEL, "max_tokens": 500, "messages": ASK, "tools": TOOLS}
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**fields), streamed):
        details = message.usage.output_tokens_details
        assert details is not None
        assert details.thinking_tokens == len("hm, so</think>")


def test_why_it_ended(server: FrontendServer, client: anthropic.Anthropic) -> None:
    """A stop sequence is named, and the limit of tokens."""
    fields: Any = {"model": MODEL, "max_tokens": 50, "messages": ASK}
    says(server, "one. two")
    answer = client.messages.create(**fields, stop_sequences=["."])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ".")
    says(server, "one", FinishReason.LENGTH)
    assert client.messages.create(**fields).stop_reason == "max_tokens"


def test_errors(server: FrontendServer, client: anthropic.Anthropic) -> None:
    """In Anthropic's form, before a stream and within one."""
    fields: Any = {"model": MODEL, "max_tokens": 50, "messages": ASK}
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**fields, extra_body={"temperature": 3.0})
    body: Any = bad.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**fields, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="image"):
        image = [{"role": "user", "content": [{"type": "image"}]}]
        client.messages.create(**{**fields, "messages": image})
    says(server, "one", FinishReason.FAILED)
    text = server.post("/v1/messages", **{**fields, "stream": True}).text
    assert text.rstrip().splitlines()[-2] == "event: error"
    assert "[DONE]" not in text


def test_thinking_and_output_config(server: FrontendServer, client: anthropic.Anthropic) -> None:
    """Both mean what they mean in chat: what the template is told, and a grammar."""
    says(server, "ok")
    fields: Any = {"model": MODEL, "messages": ASK, "max_tokens": 4096}
    for thinking, end in (
        ({"type": "enabled", "budget_tokens": 2048, "display": "summarized"}, "<think>"),
        ({"type": "adaptive"}, "<think>"),
        ({"type": "disabled"}, "<think></think>"),
    ):
        told: Any = thinking
        client.messages.create(**fields, thinking=told)
        assert prompt_of(server).endswith(f"<assistant>{end}")
        effort: Any = {"effort": "high"}
        client.messages.create(**fields, thinking=told, output_config=effort)
        assert prompt_of(server).endswith(f"<assistant>{end}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    client.messages.create(**fields, output_config=form, cache_control={"type": "ephemeral"})
    mine = server.core.submits[-1].grammar
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "hi"}]
    server.post("/v1/chat/completions", messages=messages, response_format=response_format)
    assert mine is not None and mine == server.core.submits[-1].grammar
    form["format"]["schema"] = {"not": {}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
        client.messages.create(**fields, output_config=form)
    for field, value in (("speed", "fast"), ("container", "c"), ("thinking", {"type": "deep"})):
        with pytest.raises(anthropic.BadRequestError, match=field):
            client.messages.create(**fields, extra_body={field: value})
