"""The `cearx` command: makes flags from the config structs and starts what was asked for.

`serve` runs the supervisor in this process; the other commands belong to other folders, which the
core never imports, so they are found by module name and get their arguments as they are.
"""

import ast
import importlib
import inspect
import math
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from cearx.core.config import CoreConfig, FrontendConfig, ServerConfig, WorkerConfig
from cearx.core.supervisor import ServeFlags, serve

DELEGATED = {
    "bench": ("cearx.frontend.bench.cli", "Measure any server that speaks OpenAI's API."),
    "chat": ("cearx.frontend.chat", "Chat in the terminal with a running server, or start one."),
    "replay": ("cearx.replay.cli", "Re-run the scheduler over a trace log and compare."),
    "simulate": ("cearx.replay.simulate", "Run the scheduler against a synthetic load."),
}
"""Commands of other folders: module with `main(argv) -> exit code`, and its line in the help."""

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "server": ServerConfig,
    "frontend": FrontendConfig,
    "core": CoreConfig,
    "worker": WorkerConfig,
}
"""The fields of `ServeFlags` and the structs whose fields are flags of `cearx serve`."""

ALIASES = {"num_kv_blocks": "--num-gpu-blocks-override", "compilation_level": "-O"}
"""Second spellings of flags, for people who come from vLLM."""

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
EXIT_USAGE = 2


def field_docs(config: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring below each field of a config struct, from its source."""
    tree = ast.parse(inspect.getsource(config)).body[0]
    assert isinstance(tree, ast.ClassDef), f"{config} is not a class"
    docs: dict[str, str] = {}
    name = None
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs[name] = " ".join(str(node.value.value).split())
            name = None
    return docs


def parse_bytes(text: str | int) -> int:
    """'536870912', '512MiB' or '0.5GiB' in bytes; raises ValueError for anything else.

    Typer hands defaults, which are integers, through the same parser.
    """
    if isinstance(text, int):
        return text
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            number = float(text.removesuffix(unit))
            if not math.isfinite(number):
                raise ValueError(f"{text} is no number of bytes")
            return int(number * factor)
    return int(text)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def flag_parameters() -> list[inspect.Parameter]:
    """One typer option for each field of each section."""
    parameters = []
    for section, config in SECTIONS.items():
        docs = field_docs(config)
        hints = get_type_hints(config)
        for field in msgspec.structs.fields(config):
            in_bytes = field.name.endswith(("_bytes", "_memory", "_segment_size"))
            flag = "--" + field.name.replace("_", "-")
            option = typer.Option(
                *((flag, ALIASES[field.name]) if field.name in ALIASES else ()),
                help=docs[field.name],
                rich_help_panel=section.capitalize(),
                parser=parse_bytes if in_bytes else None,
                metavar="BYTES" if in_bytes else None,
            )
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=_default(field),
                    annotation=Annotated[hints[field.name], option],
                )
            )
    return parameters


def build_flags(values: dict[str, Any]) -> ServeFlags:
    """The config structs from flag values; raises ValueError with the value and the limit."""
    configs: dict[str, Any] = {
        section: config(**{name: values[name] for name in config.__struct_fields__})
        for section, config in SECTIONS.items()
    }
    return ServeFlags(**configs)


def _serve(model: str | None = None, **values: Any) -> None:
    try:
        flags = build_flags(values)
    except ValueError as error:
        typer.echo(f"cearx: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from error
    raise typer.Exit(serve(model, flags))


def _delegate(name: str) -> Any:
    module, summary = DELEGATED[name]

    def command(context: typer.Context) -> None:
        raise typer.Exit(importlib.import_module(module).main(list(context.args)))

    command.__doc__ = summary
    return command


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"cearx {version('cearx')}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serve large language models over the OpenAI API, with every decision on record."""


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="cearx",
        rich_markup_mode=None,  # its tables cut long flags short on a narrow terminal
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    app.callback()(_root)
    model = inspect.Parameter(
        "model",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[
            str | None,
            typer.Argument(
                help="A Hugging Face id or folder, or a .gguf file"
                " (default: SmolLM2-135M-Instruct, fetched once)."
            ),
        ],
    )
    parameters = [model, *flag_parameters()]
    _serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    _serve.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command("serve", help="Serve a model over the OpenAI API.")(_serve)
    for name in DELEGATED:
        settings = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(name, context_settings=settings, add_help_option=False)(_delegate(name))
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; answers its exit code (2 for wrong usage)."""
    try:
        build_app()(args=argv)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
