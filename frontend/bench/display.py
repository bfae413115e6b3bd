"""What a person sees while a benchmark runs: a bar for the run in progress, a line for each row.

Owns the terminal. On something that is no terminal only the lines appear. Called by `matrix.py` and
`serve.py`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from cearx.frontend.bench.fleet import OnProgress

COLUMNS = (
    ("out tok/s", "output_throughput", 10),
    ("TTFT p50", "median_ttft_ms", 9),
    ("p99", "p99_ttft_ms", 9),
    ("TPOT p50", "median_tpot_ms", 9),
    ("p99", "p99_tpot_ms", 8),
    ("ITL p99", "p99_itl_ms", 8),
    ("max", "max_itl_ms", 8),
)
"""Heading, field of a row, width; times in milliseconds."""
NAME_WIDTH = 20


class Display:
    def __init__(self, console: Console) -> None:
        self.console = console

    def heading(self) -> None:
        cells = "".join(f"{title:>{width}}" for title, _, width in COLUMNS)
        self._print(f"{'':{NAME_WIDTH}}{cells}   (ms)")

    def row(self, name: str, row: dict[str, Any]) -> None:
        cells = ""
        for _, field, width in COLUMNS:
            value = row.get(field)
            cells += f"{'-' if value is None else format(value, '.1f'):>{width}}"
        verdict = "ok" if row["status"] == "ok" else f"FAILED {row['failed']}"
        self._print(f"{name:{NAME_WIDTH}}{cells}   {verdict}")
        for error, count in row["errors"].items():
            self._print(f"  {count} x {error}")
        if row["client_limits"]:
            self._print(f"  the client is the limit: {'; '.join(row['client_limits'])}")

    def note(self, text: str) -> None:
        self._print(text)

    @contextlib.contextmanager
    def bar(self, name: str, num_requests: int) -> Iterator[OnProgress]:
        """A bar over the run's requests, with the chunks that came."""
        progress = Progress(
            TextColumn(name, markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[num_chunks]:,} chunks"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        with progress:
            task = progress.add_task(name, total=num_requests, num_chunks=0)

            def show(num_ended: int, num_chunks: int) -> None:
                progress.update(task, completed=num_ended, num_chunks=num_chunks)

            yield show

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
