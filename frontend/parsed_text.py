"""What a model's text is made of: reasoning, content and calls of tools, as they come.

Owns the joining of pieces and what a text may still become, so that no cut of it into pieces can
change what comes out. Filled by the parsers (`think_splitter.py`, `tool_parsers.py`), written by
`answer_format.py`.
"""

from collections.abc import Iterable

import msgspec


class ToolDelta(msgspec.Struct, kw_only=True):
    """A piece of one call; the first one has id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """JSON text as the model wrote it, or a part of it."""


class ParsedText(msgspec.Struct, kw_only=True):
    reasoning: str = ""
    content: str = ""
    tools: list[ToolDelta] = []
    """At most one for each call, in order."""

    def add_tool(self, delta: ToolDelta) -> None:
        if self.tools and self.tools[-1].index == delta.index:
            last = self.tools[-1]
            last.id, last.name = last.id or delta.id, last.name or delta.name
            last.arguments += delta.arguments
        else:
            self.tools.append(delta)

    @property
    def is_empty(self) -> bool:
        return not (self.reasoning or self.content or self.tools)


def join_parsed(parts: Iterable[ParsedText]) -> ParsedText:
    joined = ParsedText()
    for part in parts:
        joined.reasoning += part.reasoning
        joined.content += part.content
        for delta in part.tools:
            joined.add_tool(msgspec.structs.replace(delta))
    return joined


def num_undecided(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def decided(text: str, marker: str) -> int:
    """How much of `text` can be neither `marker` nor white space in front of it."""
    return len(text[: len(text) - num_undecided(text, marker)].rstrip())
