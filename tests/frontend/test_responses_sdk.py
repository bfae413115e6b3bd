"""OpenAI's own client against /v1/responses: texts, thoughts, tools, streams, limits, errors."""

from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from fake_core import Reply, logprob_of
from frontend_server import ENGINE, MODEL, FrontendServer, frontend_server

from cearx.core.events import FinishReason
from cearx.core.messages import unpack_tokens
from cearx.frontend.chat_template import ChatTemplate
from cearx.frontend.tool_parsers import HermesParser

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> write <tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} of {{ c.function.arguments.city }}]"
    "{% endfor %}{% endfor %}<assistant>{% if enable_thinking is false %}<think></think>"
    "{% elif enable_thinking %}<think>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Genève"}}\n</tool_call>'
TEXT = f"<think>hm, so</think>I look.\n{CALL}"
TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None},
    {"type": "function", "name": "time", "parameters": {"type": "object"}, "strict": None},
]
ASK: Any = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]}
]


@pytest.fixture(scope="module", params=[1, 100])
def server(request: pytest.FixtureRequest) -> Iterator[FrontendServer]:
    engine = msgspec.structs.replace(ENGINE, max_model_len=4096, num_blocks=1024)
    with frontend_server(engine, stream_interval=request.param) as started:
        started.state.chat_template = ChatTemplate(TEMPLATE, None, None)
        started.state.make_tool_parser = HermesParser
        started.state.splits_reasoning = True
        yield started


@pytest.fixture(scope="module")
def client(server: FrontendServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="-", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def says(server: FrontendServer, text: str, ends: FinishReason = FinishReason.STOP) -> None:
    token_ids = [*text.encode(), *([256] if ends is FinishReason.STOP else [])]
    server.core.reply = lambda submit: Reply(
        token_ids=token_ids, finish_reason=ends, num_cached_tokens=16
    )


def prompt_of(server: FrontendServer) -> str:
    return bytes(list(unpack_tokens(server.core.submits[-1].token_ids))).decode()


def told(output: Any) -> list[dict[str, Any]]:
    """Items without the ids that are made anew for every answer."""
    made_up = {"id", "call_id", "parsed", "parsed_arguments"}
    items = [item.model_dump(exclude=made_up, exclude_none=True) for item in output]
    for item in items:
        for part in item.get("content", []):
            part.pop("parsed", None)
    return items


def test_items(server: FrontendServer, client: openai.OpenAI) -> None:
    """Thought, text and call, the same whole and streamed; the next turn shows them."""
    says(server, TEXT)
    fields: Any = {"model": MODEL, "input": ASK, "tools": TOOLS, "instructions": "Be brief."}
    answer = client.responses.create(**fields, metadata={"a": "b"})
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert (answer.output_text, answer.status, answer.metadata) == (
        "I look.",
        "completed",
        {"a": "b"},
    )
    call: Any = answer.output[2]
    assert (call.name, call.arguments) == ("weather", '{"city": "Genève"}')
    usage = answer.usage
    assert usage is not None
    assert usage.input_tokens == len(prompt_of(server).encode())
    assert usage.output_tokens == len(TEXT.encode()) + 1
    assert usage.output_tokens_details.reasoning_tokens == len("hm, so</think>")
    assert usage.input_tokens_details.cached_tokens == 16
    assert "<system>|Be brief.<user>|weather?" in prompt_of(server)

    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.type == "response.completed"
    assert told(last.response.output) == told(answer.output)
    assert last.response.usage == usage

    says(server, "Sunny.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "22"}
    said = [item.model_dump() for item in answer.output]
    answer = client.responses.create(model=MODEL, input=[*ASK, *said, result])
    assert "<assistant>hm, so|I look.[weather of Genève]<tool>|22<assistant>" in prompt_of(server)
    assert answer.output_text == "Sunny."


def test_order_of_events(server: FrontendServer, client: openai.OpenAI) -> None:
    """Every item and part opens once and closes once, around its deltas; these make the whole."""
    says(server, TEXT)
    events = list(client.responses.create(model=MODEL, input="hi", tools=TOOLS, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    without_repeats = [k for k, before in zip(kinds, [None, *kinds], strict=False) if k != before]
    item = ["output_item.added", "content_part.added"]
    end = ["content_part.done", "output_item.done"]
    call = "function_call_arguments"
    assert without_repeats == [
        *("created", "in_progress"),
        *(*item, "reasoning_text.delta", "reasoning_text.done", *end),
        *(*item, "output_text.delta", "output_text.done", *end),
        *("output_item.added", f"{call}.delta", f"{call}.done", "output_item.done"),
        "completed",
    ]
    for kind in ("reasoning_text", "output_text", call):
        deltas = "".join(e.delta for e in events if e.type == f"response.{kind}.delta")  # type: ignore[union-attr,misc]
        done: Any = next(e for e in events if e.type == f"response.{kind}.done")
        assert deltas == (done.arguments if kind == call else done.text)
    raw = server.post("/v1/responses", model=MODEL, input="hi", stream=True).text
    assert "event: response.created\ndata: {" in raw and "[DONE]" not in raw


def test_helper_of_the_sdk(server: FrontendServer, client: openai.OpenAI) -> None:
    """`responses.stream` gathers the events to the same response."""
    says(server, TEXT)
    with client.responses.stream(model=MODEL, input="hi", tools=TOOLS) as stream:
        gathered = stream.get_final_response()
    whole = client.responses.create(model=MODEL, input="hi", tools=TOOLS)
    assert told(gathered.output) == told(whole.output)


def test_cut_answers(server: FrontendServer, client: openai.OpenAI) -> None:
    """The limit of tokens makes an answer incomplete, with the last item."""
    says(server, "one", FinishReason.LENGTH)
    fields: Any = {"model": MODEL, "input": "hi", "max_output_tokens": 3}
    answer = client.responses.create(**fields)
    assert server.core.submits[-1].max_tokens == 3
    assert (answer.status, answer.output_text) == ("incomplete", "one")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[-1].status == "incomplete"  # type: ignore[union-attr]
    events = list(client.responses.create(**fields, stream=True))
    assert events[-1].type == "response.incomplete"
    says(server, "")
    answer = client.responses.create(model=MODEL, input="hi")
    assert [item.type for item in answer.output] == ["message"]


def test_sampling_and_thinking(server: FrontendServer, client: openai.OpenAI) -> None:
    """What was asked goes to the engine and the template, and is told back."""
    says(server, "ok")
    answer = client.responses.create(
        model=MODEL, input="hi", temperature=0.5, top_p=0.25, reasoning={"effort": "none"}
    )
    sampling = server.core.submits[-1].sampling
    assert (sampling.temperature, sampling.top_p) == (answer.temperature, answer.top_p)
    assert (answer.temperature, answer.top_p) == (0.5, 0.25)
    assert prompt_of(server).endswith("<think></think>")
    client.responses.create(model=MODEL, input="hi", reasoning={"effort": "high"})
    assert prompt_of(server).endswith("<think>")


def test_effort_means_the_same_in_chat(server: FrontendServer, client: openai.OpenAI) -> None:
    """Both tell the template of it; what chat_template_kwargs say of the same goes before."""
    says(server, "ok")
    messages: Any = [{"role": "user", "content": "hi"}]
    efforts: list[Any] = ["none", "minimal", "low", "medium", "high", "xhigh", "max", None]
    for effort in efforts:
        prompts = []
        for override in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            more = {"chat_template_kwargs": override}
            client.responses.create(
                model=MODEL, input="hi", reasoning={"effort": effort}, extra_body=more
            )
            prompts.append(prompt_of(server))
            client.chat.completions.create(
                model=MODEL, messages=messages, reasoning_effort=effort, extra_body=more
            )
            assert prompts[-1] == prompt_of(server)
        closes = "<think></think>" if effort == "none" else "<think>" if effort else "<assistant>"
        assert prompts[0].endswith(closes)
        assert prompts[1].endswith("<think>") and prompts[2].endswith("<think></think>")


def test_logprobs(server: FrontendServer, client: openai.OpenAI) -> None:
    """Those of the message's tokens, not of the thought's or the call's, and not of the end."""
    include: Any = ["message.output_text.logprobs"]
    fields: Any = {"model": MODEL, "input": "hi", "tools": TOOLS, "include": include}
    for text, start, length in ((TEXT, TEXT.index("I look"), 7), ("héllo 😀", 0, 11)):
        token_ids = [*text.encode(), 256]
        rows = [logprob_of(i, t) for i, t in enumerate(token_ids)]
        reply = Reply(token_ids=token_ids, finish_reason=FinishReason.STOP, logprobs=rows)
        server.core.reply = lambda submit, reply=reply: reply
        answer = client.responses.create(**fields, top_logprobs=2)
        assert server.core.submits[-1].sampling.num_logprobs == 2
        assert answer.top_logprobs == 2
        message: Any = next(item for item in answer.output if item.type == "message")
        told = message.content[0].logprobs
        text_of_tokens = b"".join(bytes(record.bytes) for record in told)
        assert text_of_tokens.decode() == message.content[0].text
        assert [r.logprob for r in told] == [row.logprob for row in rows[start : start + length]]
        assert [len(record.top_logprobs) for record in told] == [2] * length
        assert bytes(told[0].top_logprobs[1].bytes) == bytes(told[0].bytes)
        events: list[Any] = list(client.responses.create(**fields, top_logprobs=2, stream=True))
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        joined = [record.logprob for event in deltas for record in event.logprobs]
        done = next(event for event in events if event.type == "response.output_text.done")
        assert joined == [r.logprob for r in told] == [r.logprob for r in done.logprobs]
    client.responses.create(**fields)
    assert server.core.submits[-1].sampling.num_logprobs == 0
    with pytest.raises(openai.BadRequestError, match="include") as bad:
        client.responses.create(model=MODEL, input="hi", top_logprobs=2)
    assert bad.value.param == "top_logprobs"


def test_constraints(server: FrontendServer, client: openai.OpenAI) -> None:
    """A schema becomes the grammar of the chat route; a bad one is told by this route's name."""
    says(server, '{"a":1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    answer = client.responses.create(model=MODEL, input="hi", text=form)
    mine = server.core.submits[-1].grammar
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "hi"}]
    server.post("/v1/chat/completions", messages=messages, response_format=wanted)
    assert mine is not None and mine == server.core.submits[-1].grammar
    assert answer.text is not None and answer.text.format is not None
    assert answer.text.format.type == "json_schema"
    form["format"]["schema"] = {"not": {}}
    with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema") as bad:
        client.responses.create(model=MODEL, input="hi", text=form)
    assert bad.value.param == "text.format.schema"


def test_tool_choice(server: FrontendServer, client: openai.OpenAI) -> None:
    """One by name, one that must be, and a few that may be."""
    says(server, '{"city": "Bern"}')
    fields: Any = {"model": MODEL, "input": "hi", "tools": TOOLS}
    answer = client.responses.create(**fields, tool_choice={"type": "function", "name": "weather"})
    [call] = answer.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"city": "Bern"}')
    says(server, '[{"name": "time", "parameters": {}}]')
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "time"}],
    }
    answer = client.responses.create(**fields, tool_choice=allowed)
    grammar = server.core.submits[-1].grammar
    assert grammar is not None and "time" in grammar and "weather" not in grammar
    assert [item.type for item in answer.output] == ["function_call"]
    allowed["tools"][0]["name"] = "other"
    with pytest.raises(openai.BadRequestError, match="one of the functions"):
        client.responses.create(**fields, tool_choice=allowed)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]},
         "input[0].call_id"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ],
)  # fmt: skip
def test_refusals(server: FrontendServer, fields: dict[str, Any], param: str) -> None:
    """What does not exist, or is wrong, is a 400 that names it, and no request is made."""
    before = len(server.core.submits)
    answer = server.post("/v1/responses", **{"model": MODEL, "input": "hi", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert len(server.core.submits) == before


def test_failure_in_a_stream(server: FrontendServer, client: openai.OpenAI) -> None:
    """The last event says so, behind the end of the open item."""
    says(server, "one", FinishReason.FAILED)
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model=MODEL, input="hi")
    events = list(client.responses.create(model=MODEL, input="hi", stream=True))
    last: Any = events[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error"
    assert events[-2].type == "response.output_item.done"
