"""The parser of one choice: reasoning first, then what is behind it, content and tool calls.

Owns the order of the two and the limit of one call when parallel calls are not wanted. Called by
`choice.py`, for chat only.
"""

from collections.abc import Callable

import msgspec

from cearx.frontend.parsed_text import ParsedText
from cearx.frontend.think_splitter import OPEN, ThinkSplitter
from cearx.frontend.tool_parsers import ToolParser


class OutputRules(msgspec.Struct, frozen=True, kw_only=True):
    """How the text of one request's choices is to be read."""

    splits_reasoning: bool = False
    make_tool_parser: Callable[[], ToolParser] | None = None
    is_parallel: bool = True
    """Whether an answer may have more than one call."""
    is_named: bool = False
    """The client named the tool: an answer that holds its call has ended by "stop"."""

    def make_parser(self, prompt: str) -> "OutputParser | None":
        """For one choice behind `prompt`; None when its text is content as it is."""
        if not self.splits_reasoning and self.make_tool_parser is None:
            return None
        splitter = None
        if self.splits_reasoning:
            splitter = ThinkSplitter(is_open=prompt.rstrip().endswith(OPEN))
        tools = None if self.make_tool_parser is None else self.make_tool_parser()
        return OutputParser(self, splitter, tools)


class OutputParser:
    """`push` texts, `finish` once."""

    def __init__(
        self, rules: OutputRules, splitter: ThinkSplitter | None, tools: ToolParser | None
    ) -> None:
        self._rules = rules
        self._splitter = splitter
        self._tools = tools
        self._has_calls = False

    @property
    def ends_with_calls(self) -> bool:
        """Whether the client is told that the answer ended because of its calls."""
        return self._has_calls and not self._rules.is_named

    @property
    def is_thinking(self) -> bool:
        return self._splitter is not None and self._splitter.is_thinking

    def push(self, text: str, into: ParsedText) -> None:
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text)
            into.reasoning += reasoning
        self._answer(text, into)

    def finish(self, into: ParsedText) -> None:
        if self._splitter is not None:
            reasoning, text = self._splitter.finish()
            into.reasoning += reasoning
            self._answer(text, into)
        if self._tools is not None:
            self._tools.finish(into)
            self._look_at_calls(into)

    def _answer(self, text: str, into: ParsedText) -> None:
        if not text:
            return
        if self._tools is None:
            into.content += text
        else:
            self._tools.push(text, into)
            self._look_at_calls(into)

    def _look_at_calls(self, into: ParsedText) -> None:
        if not self._rules.is_parallel:
            into.tools = [delta for delta in into.tools if delta.index == 0]
        self._has_calls = self._has_calls or bool(into.tools)
