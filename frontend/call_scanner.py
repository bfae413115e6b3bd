"""One tool call, {"name": ..., "arguments": {...}}, read character by character.

Arguments are passed on while they come, as the model writes them; a call is announced only when its
name is known, so nothing that is announced has to be taken back. Owns the JSON of one call and
nothing around it. Used by `tool_parsers.py`.
"""

import secrets
from enum import Enum, auto

import msgspec

from cearx.frontend.parsed_text import ParsedText, ToolDelta

ARGUMENT_KEYS = ("arguments", "parameters")
SPACE = " \t\r\n"
CLOSING = {"{": "}", "[": "]"}
OUTSIDE = frozenset(
    "{}[],:+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" + SPACE
)
"""Characters that JSON has outside of strings."""
NO_ARGUMENTS = "{}"


class _State(Enum):
    BEGIN = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_STRING = auto()
    IN_NESTED = auto()
    IN_SCALAR = auto()
    END = auto()
    BROKEN = auto()


class CallScanner:
    """`push` characters until `is_over`; then `is_broken` tells whether the JSON was bad."""

    def __init__(self, index: int, *, needs_arguments: bool) -> None:
        self.index = index
        self.is_announced = False
        self._needs_arguments = needs_arguments
        self._state = _State.BEGIN
        self._key = ""
        self._name: str | None = None
        self._raw = ""
        """The key or value that is being read, if it is not passed on."""
        self._arguments: str | None = None
        """Known before the name is."""
        self._has_arguments = False
        self._passes_on = False
        self._nesting: list[str] = []
        self._is_in_string = False
        self._is_escaped = False

    @property
    def is_over(self) -> bool:
        return self._state in (_State.END, _State.BROKEN)

    @property
    def is_broken(self) -> bool:
        return self._state is _State.BROKEN

    def push(self, char: str, into: ParsedText) -> bool:
        """Whether the character belongs to the call; False for the one that breaks it."""
        if self._state is _State.IN_STRING:
            self._in_string(char, into)
        elif self._state is _State.IN_NESTED:
            self._in_nested(char, into)
        elif self._state is _State.IN_KEY:
            self._in_key(char)
        elif self._state is _State.IN_SCALAR:
            self._in_scalar(char, into)
        elif char not in SPACE:
            self._between(char, into)
        return self._state is not _State.BROKEN

    def _between(self, char: str, into: ParsedText) -> None:
        state = self._state
        if state is _State.BEGIN:
            self._state = _State.KEY if char == "{" else _State.BROKEN
        elif state is _State.COLON:
            self._state = _State.VALUE if char == ":" else _State.BROKEN
        elif state is _State.VALUE:
            self._begin_value(char, into)
        elif char == '"':
            self._state, self._raw = _State.IN_KEY, char
        elif char == "}":
            self._end(into)
        elif char != ",":
            self._state = _State.BROKEN

    def _in_key(self, char: str) -> None:
        self._raw += char
        if self._closes_string(char):
            key = _decoded(self._raw)
            self._key = key if isinstance(key, str) else ""
            self._state = _State.COLON

    def _begin_value(self, char: str, into: ParsedText) -> None:
        self._raw = char
        if char == '"':
            self._state = _State.IN_STRING
        elif char in CLOSING:
            self._state = _State.IN_NESTED
            self._nesting = [CLOSING[char]]
            is_first = self._key in ARGUMENT_KEYS and not self._has_arguments
            self._passes_on = is_first and self._name is not None and char == "{"
            if self._passes_on:
                self._has_arguments = True
                self._tell(char, into)
        elif char in OUTSIDE and char not in "}],:":
            self._state = _State.IN_SCALAR
        else:
            self._state = _State.BROKEN

    def _in_string(self, char: str, into: ParsedText) -> None:
        self._raw += char
        if self._closes_string(char):
            self._take_value(into)

    def _closes_string(self, char: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        else:
            return char == '"'
        return False

    def _in_nested(self, char: str, into: ParsedText) -> None:
        if self._is_in_string:
            self._is_in_string = not self._closes_string(char)
        elif char == '"':
            self._is_in_string = True
        elif char in CLOSING:
            self._nesting.append(CLOSING[char])
        elif char in "}]":
            if self._nesting.pop() != char:
                self._state = _State.BROKEN
                return
        elif char not in OUTSIDE:
            self._state = _State.BROKEN
            return
        if self._passes_on:
            self._tell(char, into)
        else:
            self._raw += char
        if not self._nesting:
            self._take_value(into)

    def _in_scalar(self, char: str, into: ParsedText) -> None:
        if char in ",}" or char in SPACE:
            self._take_value(into)
            if char == "}" and self._state is _State.KEY:
                self._end(into)
        elif char in OUTSIDE:
            self._raw += char
        else:
            self._state = _State.BROKEN

    def _take_value(self, into: ParsedText) -> None:
        """A value is complete."""
        self._state = _State.KEY
        if self._passes_on:
            self._passes_on = False
        elif self._key == "name" and self._name is None:
            name = _decoded(self._raw)
            if isinstance(name, str) and name:
                self._name = name
                if self._arguments is not None:
                    self._tell(self._arguments, into)
            else:
                self._state = _State.BROKEN
        elif self._key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            value = _decoded(self._raw)
            # Some models write the arguments as a text that holds JSON, or null for none.
            self._arguments = value if isinstance(value, str) else self._raw
            if value is None:
                self._arguments = NO_ARGUMENTS
            if self._name is not None:
                self._tell(self._arguments, into)

    def _end(self, into: ParsedText) -> None:
        if self._name is None or (self._needs_arguments and not self._has_arguments):
            self._state = _State.BROKEN
            return
        self._state = _State.END
        if not self._has_arguments:
            self._tell(NO_ARGUMENTS, into)

    def _tell(self, arguments: str, into: ParsedText) -> None:
        if self.is_announced:
            into.add_tool(ToolDelta(index=self.index, arguments=arguments))
        else:
            self.is_announced = True
            into.add_tool(
                ToolDelta(index=self.index, id=new_call_id(), name=self._name, arguments=arguments)
            )


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _decoded(raw: str) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return raw
