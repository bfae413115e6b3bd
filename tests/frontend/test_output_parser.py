"""Reasoning, content and tool calls in texts: by hand, by an independent reading, by any cut."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cearx.frontend.output_parser import OutputRules
from cearx.frontend.parsed_text import ParsedText, join_parsed
from cearx.frontend.tool_parsers import (
    HermesParser,
    ListParser,
    Llama3Parser,
    NamedParser,
    ToolParser,
    detect_tool_parser,
    find_tool_parser,
)

MAKERS: dict[str, Callable[[], ToolParser] | None] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "list": ListParser,
    "named": lambda: NamedParser("pick"),
    "none": None,
}
CALL = '{"name": "f", "arguments": {"a": [1, "}"]}}'
PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<", "</", "<t"),
        *(CALL, f"<tool_call>\n{CALL}\n</tool_call>", '{"parameters": {}, "name": "g"}'),
        *('{"name": "', '"arguments": ', '"parameters": ', "{", "}", "[", "]", ",", ":", '"', "\\"),
        *('"name"', "null", "12", " ", "\n", "a", "é", ";", '"{\\"x\\": 1}"', "true"),
    ]
)
TEXTS = st.lists(PIECES, max_size=14).map("".join)
CUTS = st.lists(st.integers(0, 400), max_size=12)
Calls = list[tuple[str | None, str]]


def parse(
    pieces: Sequence[str], maker: str, *, thinks: bool = False, is_open: bool = False
) -> tuple[str, str, Calls]:
    """Reasoning, content and (name, arguments) of each call."""
    rules = OutputRules(splits_reasoning=thinks, make_tool_parser=MAKERS[maker])
    parser = rules.make_parser("<think>\n" if is_open else "x")
    if parser is None:
        return "", "".join(pieces), []
    parts = [ParsedText() for _ in range(len(pieces) + 1)]
    for piece, part in zip(pieces, parts, strict=False):
        parser.push(piece, part)
    parser.finish(parts[-1])
    joined = join_parsed(parts)
    assert [tool.index for tool in joined.tools] == list(range(len(joined.tools)))
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", tool.id or "") for tool in joined.tools)
    return (
        joined.reasoning,
        joined.content,
        [(tool.name, tool.arguments) for tool in joined.tools],
    )


@settings(max_examples=500)
@given(text=TEXTS, cuts=CUTS, maker=st.sampled_from([*MAKERS]), mode=st.integers(0, 2))
@example(text=f"<tool_call>{CALL}<", cuts=[], maker="hermes", mode=0)
@example(text=f"{CALL} <think>", cuts=[], maker="llama3_json", mode=0)
def test_any_cut_gives_the_same(text: str, cuts: list[int], maker: str, mode: int) -> None:
    """Whole, cut anywhere, and character by character."""
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    starts = [0, *ends[:-1]]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    flags: dict[str, Any] = {"thinks": mode > 0, "is_open": mode == 2}
    whole = parse([text], maker, **flags)
    assert parse(pieces, maker, **flags) == whole
    assert parse(list(text), maker, **flags) == whole


@settings(max_examples=300)
@given(text=st.lists(PIECES.filter(lambda p: "tool_call" not in p), max_size=12).map("".join))
def test_text_without_calls_is_content(text: str) -> None:
    """Nothing is lost or changed where there is no tag."""
    assert parse(list(text), "hermes") == ("", text, [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=4)
NAMES = st.text(min_size=1, max_size=8)


@settings(max_examples=200)
@given(
    calls=st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3),
    indent=st.sampled_from([None, 1]),
    is_name_last=st.booleans(),
    is_ascii=st.booleans(),
)
def test_well_formed_calls_come_through(
    calls: list[tuple[str, dict[str, Any]]], indent: int | None, is_name_last: bool, is_ascii: bool
) -> None:
    """Whatever JSON the arguments hold, in each way of writing calls."""
    for maker, key in (("hermes", "arguments"), ("llama3_json", "parameters"), ("list", "name")):
        key = "parameters" if key == "name" else key
        texts = []
        for name, arguments in calls:
            call = (
                {key: arguments, "name": name} if is_name_last else {"name": name, key: arguments}
            )
            texts.append(json.dumps(call, indent=indent, ensure_ascii=is_ascii))
        text = {
            "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in texts),
            "llama3_json": "; ".join(texts),
            "list": f"[{', '.join(texts)}]",
        }[maker]
        reasoning, content, found = parse([text], maker)
        assert (reasoning, content) == ("", "")
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n", "Let me see.", [CALL]),
        (f"<tool_call>{CALL}</tool_call> done", " done", [CALL]),
        (f"<tool_call>{CALL}", "", [CALL]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, "}"]}\n</tool_call>', "", [CALL]),
        ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call>{"na', '<tool_call>{"na', []),
    ],
)
def test_hermes(text: str, content: str, calls: list[str]) -> None:
    """White space around calls goes, what is no call stays, a missing end is forgiven."""
    expected = [("f", json.dumps(json.loads(call)["arguments"])) for call in calls]
    assert parse([text], "hermes") == ("", content, expected)


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('{"name": "f"}', "f", "{}"),
        ('{"name": "f", "arguments": null}', "f", "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "f", '{"a": 1}'),
        ('{"type": "function", "name": "f", "arguments": {"b":2}, "x": [1]}', "f", '{"b":2}'),
        ('{"name": "f", "arguments": {"city": "Par', "f", '{"city": "Par'),
    ],
)
def test_arguments_in_odd_forms(text: str, name: str, arguments: str) -> None:
    """None, text in text, further keys, and a call that the limit of tokens cut off."""
    assert parse([f"<tool_call>{text}"], "hermes") == ("", "", [(name, arguments)])


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", 1),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", 2),
        ('{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}', 0),
        ('The answer is {"name": "f", "parameters": {}}', None, 0),
        (" plain", " plain", 0),
    ],
)
def test_llama3(text: str, content: str | None, num_calls: int) -> None:
    """JSON that is the whole answer and has parameters is a call, other JSON is content."""
    reasoning, found, calls = parse([text], "llama3_json")
    assert (reasoning, found, len(calls)) == ("", text if content is None else content, num_calls)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nyes", False, "hm\n\nso", "yes"),
        ("hm</think>yes", True, "hm", "yes"),
        ("yes", False, "", "yes"),
        ("\n yes <think>", False, "", "\n yes <think>"),
        ("<think>cut of", False, "cut of", ""),
        ("<think></think>", False, "", ""),
        ("<thin", False, "", "<thin"),
    ],
)
def test_reasoning(text: str, is_open: bool, reasoning: str, content: str) -> None:
    """Between the tags, or from the start when the prompt opened it; else all is content."""
    assert parse([text], "none", thinks=True, is_open=is_open) == (reasoning, content, [])


def test_a_call_in_a_thought_is_none() -> None:
    """Only what stands behind the reasoning is acted on."""
    text = f"<think>I could <tool_call>{CALL}</tool_call></think><tool_call>{CALL}</tool_call>"
    reasoning, content, calls = parse([text], "hermes", thinks=True)
    assert "<tool_call>" in reasoning
    assert (content, len(calls)) == ("", 1)


def test_one_call_where_parallel_ones_are_not_wanted() -> None:
    """The first call only, whole."""
    rules = OutputRules(make_tool_parser=HermesParser, is_parallel=False)
    parser, into = rules.make_parser(""), ParsedText()
    assert parser is not None
    parser.push(f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", into)
    parser.finish(into)
    assert [json.loads(tool.arguments) for tool in into.tools] == [{"a": [1, "}"]}]


def test_parsers_are_found_by_name_and_by_template() -> None:
    """Names of the table, and what the templates of the families show."""
    assert find_tool_parser("hermes") is HermesParser
    with pytest.raises(ValueError, match=r"hermes, llama3_json.*'mistral'"):
        find_tool_parser("mistral")
    assert detect_tool_parser("... <tool_call>\\n{...") == "hermes"
    assert detect_tool_parser('{"name": function name, "parameters": dictionary}') == "llama3_json"
    assert detect_tool_parser("{{ messages[0].content }}") is None
