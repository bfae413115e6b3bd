"""The Jinja environment that chat templates run in: no way out, and bounded work.

A template comes with a model from the internet, so it is code that nobody here has read. Jinja's
immutable sandbox keeps it from attributes and side effects; this file bounds its time, its output
and the size of what it builds. Owns no template and no message; used by `chat_template.py`.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SECONDS = 2.0
MAX_CHARS = 16 * 1024 * 1024
"""Of the output, and of any string that the template builds on the way."""
MAX_ITEMS = 1 << 20
"""Of any list that the template builds, and the largest number it may pass to a function."""
MAX_EXPONENT = 64
MAX_POWER_BITS = 4096

REMOVED_GLOBALS = ("lipsum", "cycler", "joiner")
REMOVED_FILTERS = (
    "attr", "batch", "center", "filesizeformat", "format", "pprint", "random", "slice", "urlize",
    "wordwrap", "xmlattr",
)  # fmt: skip
"""No chat template needs them, and they blow up small inputs or reach for attributes."""
REFUSED_STR_METHODS = frozenset(
    ("center", "expandtabs", "ljust", "rjust", "zfill", "format", "format_map", "translate")
)


class LimitExceeded(SecurityError):
    """The template does more than a chat template has reason to."""


_deadline: ContextVar[float] = ContextVar("template_deadline")


def tick() -> str:
    """Called in every round of a loop and in every macro; raises when the time is over."""
    if time.monotonic() > _deadline.get():
        raise LimitExceeded(f"it runs longer than {MAX_SECONDS} s")
    return ""


def _check_size(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_CHARS:
        raise LimitExceeded(f"it builds a text of more than {MAX_CHARS} characters")
    if isinstance(value, list | tuple) and len(value) > MAX_ITEMS:
        raise LimitExceeded(f"it builds a list of more than {MAX_ITEMS} items")
    return value


def _expect_chars(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise LimitExceeded(f"it builds a text of more than {MAX_CHARS} characters")


def concat(*parts: Any) -> str:
    """The `~` operator."""
    texts = [str(part) for part in parts]
    _expect_chars(sum(map(len, texts)))
    return "".join(texts)


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012 - the name and the type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class SandboxNamespace(Namespace):
    """`namespace()` without names that begin with an underscore."""

    def __init__(self, /, *args: Any, **attributes: Any) -> None:
        names = dict(*args, **attributes)
        for name in names:
            SandboxNamespace._check(name)  # through the class: attributes are the template's
        super().__init__(names)

    def __setitem__(self, name: str, value: Any) -> None:
        SandboxNamespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with limits on what they can do."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    tick = staticmethod(tick)
    concat_parts = staticmethod(concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        for name in REMOVED_GLOBALS:
            del self.globals[name]
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        for name in ("replace", "join", "indent"):
            self.filters[name] = _BOUNDED_FILTERS[name]
        self.globals["namespace"] = SandboxNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Code generation, after a `tick` was put in every loop and `~` was made to check sizes."""
        _instrument(source)
        code: str = super()._generate(source, *args, **kwargs)
        return code

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _expect_chars(len(left) + len(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("the % operator on a text is not available in a chat template")
        return _check_size(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > MAX_ITEMS:
                raise LimitExceeded(f"it passes {value} to a function, the limit is {MAX_ITEMS}")
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            _check_str_method(owner, function.__name__, args)
        return _check_size(super().call(context, function, *args, **kwargs))


def _check_product(left: Any, right: Any) -> None:
    for value, factor in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(factor, int):
            limit = MAX_CHARS if isinstance(value, str) else MAX_ITEMS
            if len(value) * factor > limit:
                raise LimitExceeded(f"it repeats something to more than {limit} items")
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_POWER_BITS:
            raise LimitExceeded(f"it computes a number of more than {MAX_POWER_BITS} bits")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and right > 0:
        if left.bit_length() * right > MAX_POWER_BITS:
            raise LimitExceeded(f"it computes a number of more than {MAX_POWER_BITS} bits")


def _check_str_method(owner: str, name: str, args: tuple[Any, ...]) -> None:
    if name in REFUSED_STR_METHODS:
        raise SecurityError(f"the method {name} of a text is not available in a chat template")
    if name == "replace" and len(args) >= 2:
        _check_replace(owner, *args[:2])
    if name == "join" and args and isinstance(args[0], list | tuple):
        _check_join(owner, args[0])


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _expect_chars(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _check_join(separator: str, items: Iterable[Any]) -> None:
    lengths = [len(item) for item in items if isinstance(item, str)]
    _expect_chars(sum(lengths) + len(separator) * len(lengths))


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    text = str(text)
    _check_replace(text, old, new)
    return text.replace(old, new, count)


def _join(items: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
    values = list(items)
    if attribute is not None:
        values = [_item(value, attribute) for value in values]
    texts = [str(value) for value in values]
    _check_join(separator, texts)
    return separator.join(texts)


def _item(value: Any, key: str | int) -> Any:
    if isinstance(value, Mapping | list | tuple):
        return value[key]  # type: ignore[index]
    raise TemplateError(f"join(attribute={key!r}) needs mappings, got {type(value).__name__}")


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(width, MAX_CHARS)
    lines = str(text).split("\n")
    _expect_chars(len(text) + len(margin) * len(lines))
    indented = [margin + line if line or blank else line for line in lines[1:]]
    head = margin + lines[0] if first else lines[0]
    return "\n".join([head, *indented])


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    if isinstance(indent, int) and indent > 64:
        raise LimitExceeded(f"it indents JSON by {indent}, the limit is 64")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


_BOUNDED_FILTERS: dict[str, Callable[..., Any]] = {
    "replace": _replace,
    "join": _join,
    "indent": _indent,
}


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > 256:
        raise LimitExceeded(f"strftime_now takes at most 256 characters, got {len(layout)}")
    return datetime.now().strftime(layout)


def _instrument(source: nodes.Template) -> None:
    for block in source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(block, nodes.For | nodes.Macro | nodes.CallBlock), block
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        block.body.insert(0, nodes.ExprStmt(call).set_lineno(block.lineno))
    _replace_concats(source)


def _replace_concats(node: nodes.Node) -> None:
    """Makes each `a ~ b` a call, as the sandbox does not intercept this operator."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _replace_concats(value)
            setattr(node, name, _checked_concat(value))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _replace_concats(item)
                    value[index] = _checked_concat(item)


def _checked_concat(node: nodes.Node) -> nodes.Node:
    if not isinstance(node, nodes.Concat):
        return node
    function = nodes.EnvironmentAttribute("concat_parts")
    return nodes.Call(function, node.nodes, [], None, None).set_lineno(node.lineno)


@contextmanager
def _time_limit() -> Iterator[None]:
    token = _deadline.set(time.monotonic() + MAX_SECONDS)
    try:
        yield
    finally:
        _deadline.reset(token)


def render(template: Template, variables: Mapping[str, Any]) -> str:
    """Renders within the limits; raises jinja2.TemplateError and what the template provokes."""
    pieces: list[str] = []
    num_chars = 0
    with _time_limit():
        for piece in template.generate(variables):
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                raise LimitExceeded(f"it writes more than {MAX_CHARS} characters")
            tick()
            pieces.append(piece)
    return "".join(pieces)
