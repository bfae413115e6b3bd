"""Tool calls in a model's text, by the way in which the model was taught to write them.

A parser gets the text behind the reasoning in pieces and fills in content and calls; any cut gives
the same result. What looks like a call and is none becomes content, as it was written. Found by
name, also among the entry points `cearx.parsers` of installed packages. Used by `output_parser.py`.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Protocol

from cearx.frontend.call_scanner import SPACE, CallScanner, new_call_id
from cearx.frontend.parsed_text import ParsedText, ToolDelta, decided

ENTRY_POINTS = "cearx.parsers"
OPEN = "<tool_call>"
CLOSE = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class ToolParser(Protocol):
    def push(self, text: str, into: ParsedText) -> None: ...

    def finish(self, into: ParsedText) -> None:
        """Once, at the end of the text."""


class _CallReader:
    """One call at a time, with its text as long as it may turn out to be none."""

    def __init__(self, *, needs_arguments: bool) -> None:
        self.num_calls = 0
        self._needs_arguments = needs_arguments
        self._scanner: CallScanner | None = None
        self._raw = ""

    def begin(self, raw: str) -> None:
        """A call may begin; `raw` is what announced it."""
        self._raw = raw
        self._scanner = CallScanner(self.num_calls, needs_arguments=self._needs_arguments)

    def push(self, text: str, into: ParsedText) -> tuple[str, bool | None]:
        """The text behind the call, and whether it was one; None while it goes on."""
        scanner = self._scanner
        assert scanner is not None, "no call has begun"
        for position, char in enumerate(text):
            belongs = scanner.push(char, into)
            if scanner.is_over:
                end = position + belongs
                is_call = scanner.is_announced
                self.num_calls += is_call
                if not is_call:
                    into.content += self._raw + text[:end]
                return text[end:], is_call
        if not scanner.is_announced:
            self._raw += text
        return "", None

    def finish(self, into: ParsedText) -> None:
        if self._scanner is not None and not self._scanner.is_announced:
            into.content += self._raw


class _SteppedParser:
    """Text that is held until the present step takes it; a step may choose the next one."""

    def __init__(self, needs_arguments: bool, first_step: Callable[[ParsedText], None]) -> None:
        self._reader = _CallReader(needs_arguments=needs_arguments)
        self._step = first_step
        self._held = ""

    def push(self, text: str, into: ParsedText) -> None:
        self._held += text
        step = None
        while self._held and step != self._step:
            step = self._step
            step(into)


class HermesParser(_SteppedParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen2.5, Qwen3."""

    def __init__(self) -> None:
        super().__init__(needs_arguments=False, first_step=self._content)

    def finish(self, into: ParsedText) -> None:
        if self._step == self._call:
            self._reader.finish(into)
        elif self._step == self._content and not (self._reader.num_calls and self._held.isspace()):
            into.content += self._held

    def _content(self, into: ParsedText) -> None:
        start = self._held.find(OPEN)
        if start >= 0:
            into.content += self._held[:start].rstrip()
            self._held = self._held[start + len(OPEN) :]
            self._reader.begin(OPEN)
            self._step = self._call
        else:
            length = decided(self._held, OPEN)
            into.content += self._held[:length]
            self._held = self._held[length:]

    def _call(self, into: ParsedText) -> None:
        self._held, is_call = self._reader.push(self._held, into)
        if is_call is not None:
            self._step = self._closing if is_call else self._content

    def _closing(self, into: ParsedText) -> None:
        """Whatever stands between a call and its end is noise."""
        end = self._held.find(CLOSE)
        if end >= 0:
            self._held = self._held[end + len(CLOSE) :]
            self._step = self._content
        else:
            self._held = self._held[-(len(CLOSE) - 1) :]


class Llama3Parser(_SteppedParser):
    """{"name": ..., "parameters": {...}} as the whole answer, several with semicolons: Llama 3."""

    def __init__(self) -> None:
        super().__init__(needs_arguments=True, first_step=self._begin)

    def finish(self, into: ParsedText) -> None:
        if self._step == self._call:
            self._reader.finish(into)
        elif self._step == self._begin:
            into.content += self._held

    def _begin(self, into: ParsedText) -> None:
        bare = self._held.lstrip()
        if bare.startswith(PYTHON_TAG):
            bare = bare.removeprefix(PYTHON_TAG).lstrip()
        elif PYTHON_TAG.startswith(bare):
            return
        self._begin_call_or_content(bare)

    def _between(self, into: ParsedText) -> None:
        """What parts two calls is kept: behind the last one it begins the content."""
        self._begin_call_or_content(self._held.lstrip(SPACE + ";"))

    def _begin_call_or_content(self, bare: str) -> None:
        if bare.startswith("{"):
            self._reader.begin(self._held[: len(self._held) - len(bare)])
            self._held = bare
            self._step = self._call
        elif bare:
            self._step = self._content

    def _call(self, into: ParsedText) -> None:
        self._held, is_call = self._reader.push(self._held, into)
        if is_call is not None:
            self._step = self._between if is_call else self._content

    def _content(self, into: ParsedText) -> None:
        into.content += self._held
        self._held = ""


class NamedParser:
    """For a text that was made to be the arguments of one tool."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str, into: ParsedText) -> None:
        name, self._name = self._name, None
        call_id = None if name is None else new_call_id()
        into.add_tool(ToolDelta(index=0, id=call_id, name=name, arguments=text))

    def finish(self, into: ParsedText) -> None:
        """Nothing is held back."""


class ListParser:
    """For a text that was made to be a JSON list of calls."""

    def __init__(self) -> None:
        self._reader = _CallReader(needs_arguments=False)
        self._is_in_call = False

    def push(self, text: str, into: ParsedText) -> None:
        while text:
            if self._is_in_call:
                text, is_call = self._reader.push(text, into)
                self._is_in_call = is_call is None
            else:
                text = text.lstrip(SPACE + "[],")
                if text.startswith("{"):
                    self._reader.begin("")
                    self._is_in_call = True
                elif text:  # not what it was made to be
                    into.content += text[0]
                    text = text[1:]

    def finish(self, into: ParsedText) -> None:
        if self._is_in_call:
            self._reader.finish(into)


PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
}


def find_tool_parser(name: str) -> Callable[[], ToolParser]:
    """Raises ValueError that lists the names."""
    if name in PARSERS:
        return PARSERS[name]
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in installed:
        made: Callable[[], ToolParser] = installed[name].load()
        return made
    names = ", ".join([*PARSERS, *sorted(installed)])
    raise ValueError(f"--tool-call-parser must be auto, none, {names}, got {name!r}")


def detect_tool_parser(template_source: str) -> str | None:
    """The name of the parser for what a chat template teaches, or None."""
    if OPEN in template_source:
        return "hermes"
    if PYTHON_TAG in template_source or '"parameters": ' in template_source:
        return "llama3_json"
    return None
