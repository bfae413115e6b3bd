"""The Jinja environment that chat templates run in: no way out, and bounded work.

A template comes with a model from the internet, so it is code that nobody here has read. Jinja's
immutable sandbox keeps it from attributes and side effects; here its loops get a clock and its
operators, functions and filters the checks of `template_limits.py`. Owns no template and no
message; used by `chat_template.py`.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from cearx.frontend import template_limits as limits

REMOVED_GLOBALS = ("lipsum", "cycler", "joiner")
REMOVED_FILTERS = ("attr", "center", "pprint", "random", "sum", "urlize", "wordwrap", "xmlattr")
"""No chat template needs them, and they blow up small inputs or reach for attributes."""


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
            _check_name(name)
        super().__init__(names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with limits on what they can do."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    tick = staticmethod(limits.tick)
    concat_parts = staticmethod(limits.concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=limits.check_printable,
        )
        for name in REMOVED_GLOBALS:
            del self.globals[name]
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters.update(limits.FILTERS)
        self.filters = {name: limits.bounded(name, found) for name, found in self.filters.items()}
        self.globals["namespace"] = SandboxNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Code generation, after a `tick` was put in every loop and `~` was made to check sizes."""
        _instrument(source)
        code: str = super()._generate(source, *args, **kwargs)
        return code

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        limits.check_binary(operator, left, right)
        return limits.check_size(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # Jinja wraps `format` of a text
        owner = getattr(method, "__self__", None)
        limits.check_method(owner, getattr(method, "__name__", ""), args, kwargs)
        return limits.check_size(super().call(context, function, *args, **kwargs))


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > limits.MAX_FORMAT:
        raise limits.LimitExceeded(
            f"strftime_now takes at most {limits.MAX_FORMAT} characters, got {len(layout)}"
        )
    limits.check_layout(layout)
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


def render(template: Template, variables: Mapping[str, Any]) -> str:
    """Renders within the limits; raises jinja2.TemplateError and what the template provokes."""
    pieces: list[str] = []
    num_chars = 0
    with limits.time_limit():
        for piece in template.generate(variables):
            num_chars += len(piece)
            limits.check_chars(num_chars)
            pieces.append(piece)
    return "".join(pieces)
