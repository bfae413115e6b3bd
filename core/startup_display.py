"""What a person sees while the server starts: one line a process, with a bar where sizes are known.

On something that is no terminal, each new stage is one plain line.
"""

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)


class StartupDisplay:
    """Use as a context manager; the lines disappear at its end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[process]}: {task.description}", markup=False),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._stages: dict[str, str] = {}

    def __enter__(self) -> "StartupDisplay":
        self._progress.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, process: str, stage: str, completed: int, total: int) -> None:
        """`total` 0 means that nobody knows how long it takes."""
        if process not in self._tasks:
            self._tasks[process] = self._progress.add_task(stage, process=process)
        elif self._stages[process] != stage:
            self._progress.reset(self._tasks[process])  # else a full bar stops its clock for good
        self._progress.update(
            self._tasks[process], description=stage, completed=completed, total=total or None
        )
        if self._stages.get(process) != stage:
            self._stages[process] = stage
            if not self._console.is_terminal:
                self._console.print(
                    f"{process}: {stage}", highlight=False, soft_wrap=True, markup=False
                )

    def done(self, process: str) -> None:
        if process in self._tasks:
            self._progress.update(self._tasks[process], visible=False)
