"""Text for a person: tables and units. Whatever comes from a file is shown without its escapes."""

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 140
"""Columns where the output is no terminal."""


def console() -> Console:
    """Writes to standard output; square brackets in what it prints mean nothing."""
    is_terminal = sys.stdout.isatty()
    return Console(
        markup=False, highlight=False, emoji=False, width=None if is_terminal else PIPE_WIDTH
    )


def table(columns: Iterable[str], rows: Iterable[Iterable[object]], title: str = "") -> Table:
    """The first column to the left, the others to the right."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*(show(value) for value in row))
    return made


def show(value: object) -> str:
    """A cell; nothing for None."""
    return "-" if value is None else printable(str(value))


def printable(text: str) -> str:
    """Without control characters, which could move the cursor or colour what follows."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def duration(us: int | None) -> str | None:
    """In the unit that leaves one to three digits before the point."""
    if us is None:
        return None
    if abs(us) < 1000:
        return f"{us} us"
    if abs(us) < 1_000_000:
        return f"{us / 1000:.1f} ms"
    return f"{us / 1_000_000:.2f} s"
