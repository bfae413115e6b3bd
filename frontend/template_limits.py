"""How much a chat template may do: time, sizes of what it builds, widths of what it formats.

Owns the limits, their checks and the filters that need one before they work (afterwards would be
too late: one `replace` can make terabytes out of megabytes). Knows the values that templates handle
and nothing of Jinja's machinery, which is `template_sandbox.py`.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError

MAX_SECONDS = 2.0
"""Of computing in one rendering; waiting for other threads does not count."""
QUIET_S = 0.05
"""Of any time, at the beginning of a rendering, that is not counted; nearly all end within it."""
MAX_CHARS = 16 * 1024 * 1024
"""Of the output, and of any string that the template builds on the way."""
MAX_ITEMS = 1 << 20
"""Of any list that the template builds, and the largest width or count it may ask for."""
MAX_BITS = 4096
"""Of any number that the template computes."""
MAX_FORMAT = 256
"""Characters of a layout for dates; widths in layouts have at most three digits."""
WIDE_FORMAT = re.compile(r"\d{4,}|\*|:[^{}]*\{")
"""A width of four digits, or one that is computed."""
PADDING_METHODS = frozenset(("center", "ljust", "rjust", "zfill"))
REFUSED_METHODS = frozenset(("encode", "expandtabs", "format_map", "to_bytes", "translate"))
COUNTING_FILTERS = frozenset(("batch", "indent", "slice"))


class LimitExceeded(SecurityError):
    """The template does more than a chat template has reason to."""


class _Clock:
    """Of one rendering: the thread's own clock, which costs a system call, from QUIET_S on."""

    def __init__(self) -> None:
        self.looks_at = time.perf_counter() + QUIET_S
        self._deadline: float | None = None

    def look(self) -> None:
        now = time.thread_time()
        if self._deadline is None:
            self._deadline = now + MAX_SECONDS
        if now > self._deadline:
            raise LimitExceeded(f"it computes for more than {MAX_SECONDS} s")


_clock: ContextVar[_Clock | None] = ContextVar("template_clock", default=None)


@contextmanager
def time_limit() -> Iterator[None]:
    """Everything within has MAX_SECONDS of this thread's computing time, behind QUIET_S."""
    token = _clock.set(_Clock())
    try:
        yield
    finally:
        _clock.reset(token)


def tick() -> None:
    """Called in every round of a loop; raises when the time is over."""
    clock = _clock.get()
    if clock is not None and time.perf_counter() > clock.looks_at:
        clock.look()


def check_chars(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise LimitExceeded(f"it builds a text of more than {MAX_CHARS} characters")


def check_size(value: Any) -> Any:
    """The value, if it is not larger than it may be."""
    if isinstance(value, str):
        check_chars(len(value))
    elif isinstance(value, list | tuple | dict) and len(value) > MAX_ITEMS:
        raise LimitExceeded(f"it builds a list of {len(value)} items, the limit is {MAX_ITEMS}")
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise LimitExceeded(f"it computes a number of more than {MAX_BITS} bits")
    return value


def check_printable(value: Any) -> Any:
    """The value, if its text is not longer than it may be: lists can hold one text many times."""
    if isinstance(value, list | tuple | dict):
        _count_chars(value, MAX_CHARS)
    return value


def _count_chars(value: Any, left: int) -> int:
    """Lowers `left` by about the length of the value's text; raises below zero."""
    left -= len(value) if isinstance(value, str) else 1
    if left < 0:
        raise LimitExceeded(f"it builds a text of more than {MAX_CHARS} characters")
    if isinstance(value, Mapping):
        for key, item in value.items():
            left = _count_chars(item, _count_chars(key, left))
    elif isinstance(value, list | tuple):
        tick()
        for item in value:
            left = _count_chars(item, left)
    return left


def check_arguments(values: Iterable[Any]) -> None:
    """For functions and filters whose numbers are counts and widths."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_ITEMS:
            raise LimitExceeded(f"it passes {value} to a function, the limit is {MAX_ITEMS}")


def check_binary(operator: str, left: Any, right: Any) -> None:
    """Called before `+ * ** %` are computed."""
    if operator == "+" and isinstance(left, str) and isinstance(right, str):
        check_chars(len(left) + len(right))
    elif operator == "*":
        _check_repeat(left, right)
        _check_repeat(right, left)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * right > MAX_BITS:
            raise LimitExceeded(f"it computes a number of more than {MAX_BITS} bits")
    elif operator == "%" and isinstance(left, str):
        check_layout(left)
        check_printable(right)


def _check_repeat(value: Any, factor: Any) -> None:
    if isinstance(value, str | list | tuple) and isinstance(factor, int):
        limit = MAX_CHARS if isinstance(value, str) else MAX_ITEMS
        if len(value) * factor > limit:
            raise LimitExceeded(f"it repeats something to more than {limit} items")


def check_layout(layout: str) -> None:
    if wide := WIDE_FORMAT.search(layout):
        raise LimitExceeded(f"it formats to a width of {wide[0]}, the limit is 999")


def check_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Called before a method of a text or number is: those that can make much out of little."""
    if not isinstance(owner, str | int):
        return
    if name in REFUSED_METHODS:
        raise SecurityError(f"the method {name!r} is not available in a chat template")
    if isinstance(owner, str):
        _check_text_method(owner, name, args, kwargs)


def _check_text_method(
    text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    if name in PADDING_METHODS:
        check_arguments(args)
    if name == "format":
        check_layout(text)
        check_printable([*args, kwargs])
    if name == "replace" and len(args) >= 2:
        check_replace(text, *args[:2])
    if name == "join" and args and isinstance(args[0], list | tuple | dict):
        check_join(text, args[0])


def check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        check_chars(len(text) + text.count(old) * max(0, len(new) - len(old)))


def check_join(separator: str, items: Iterable[Any]) -> None:
    lengths = [len(item) for item in items if isinstance(item, str)]
    check_chars(sum(lengths) + len(separator) * len(lengths))


def concat(*parts: Any) -> str:
    """The `~` operator."""
    texts = [str(check_printable(part)) for part in parts]
    check_join("", texts)
    return "".join(texts)


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `name` with a clock, with small counts and a result that is not too large."""

    @wraps(function)  # keeps Jinja's marks, for filters that want the environment
    def limited(*args: Any, **kwargs: Any) -> Any:
        tick()
        if name in COUNTING_FILTERS:
            check_arguments((*args[1:], *kwargs.values()))
        return check_size(function(*args, **kwargs))

    return limited


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    found = str(check_printable(text))
    check_replace(found, old, new)
    return found.replace(old, new, count)


def _join(items: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
    values: list[Any] = list(items)
    if attribute is not None:
        values = [value[attribute] for value in values]
    texts = [str(check_printable(value)) for value in values]
    check_join(separator, texts)
    return separator.join(texts)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * width
    head, *lines = str(check_printable(text)).split("\n")
    check_chars(len(head) + sum(map(len, lines)) + len(margin) * (len(lines) + 1))
    indented = [margin + line if line or blank else line for line in lines]
    return "\n".join([margin + head if first else head, *indented])


def _format(layout: Any, *args: Any, **kwargs: Any) -> str:
    layout = str(layout)
    check_layout(layout)
    check_printable([*args, kwargs])
    text: str = layout % (kwargs or args)
    return text


def _string(value: Any) -> str:
    return str(check_printable(value))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    check_printable(value)
    if isinstance(indent, int) and indent > 64:
        raise LimitExceeded(f"it indents JSON by {indent}, the limit is 64")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


FILTERS: dict[str, Callable[..., Any]] = {
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "string": _string,
    "tojson": _tojson,
}
"""Filters that check sizes before they work; all others are checked afterwards by `bounded`."""
