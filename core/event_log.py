"""Where events and decisions go: the interface of the trace log, and the one of `--trace off`.

Called by `engine.py` and `process.py`; `trace_writer.py` and `metrics_fold.py` implement it.
"""

from collections.abc import Callable
from typing import Protocol

from cearx.core.events import Decision, Event
from cearx.core.trace_records import StepNote


class EventLog(Protocol):
    """Where events and decisions go, in the order in which they became true."""

    def append(self, record: Event | Decision | StepNote) -> None:
        """A note is of the step that finished last."""

    def flush(self) -> None: ...

    def maintain(self, snapshot: Callable[[], bytes]) -> None: ...

    def pin(self, reason: str) -> None: ...


class NullLog:
    """`--trace off`."""

    def append(self, record: Event | Decision | StepNote) -> None:
        pass

    def flush(self) -> None:
        pass

    def maintain(self, snapshot: Callable[[], bytes]) -> None:
        pass

    def pin(self, reason: str) -> None:
        pass
