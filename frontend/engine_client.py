"""The frontend's view of the engine: requests go in, streams of outputs come back.

Owns the link to the core and who hears each of its messages: the window of requests, the questions
that wait for answers, the labels, the engine's status. Knows no HTTP and no text. The routes call
it; `process.py` creates it.
"""

from collections.abc import Sequence
from pathlib import Path

import structlog
import zmq

from cearx.core.events import CancelReason, PrefixCacheEmptied
from cearx.core.messages import (
    AbortLabels,
    CoreToFrontend,
    EngineMetrics,
    PrefixCacheWasReset,
    Profiled,
    Refused,
    StepOutputs,
    Vocabulary,
)
from cearx.frontend.core_questions import CoreQuestions
from cearx.frontend.core_socket import CoreSocket
from cearx.frontend.engine_status import EngineStatus
from cearx.frontend.errors import ApiError, unavailable
from cearx.frontend.request_labels import RequestLabels
from cearx.frontend.request_stream import RequestStream
from cearx.frontend.request_window import EngineRequest, RequestWindow

log = structlog.get_logger()


class EngineClient:
    """One core link of one frontend; see the module docstring. Use inside the event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        runtime_dir: Path,
        boot_id: int,
        frontend_index: int,
    ) -> None:
        self.status = EngineStatus()
        self.require_ready = self.status.require_ready
        self.require_engine = self.status.require_engine
        self.labels = RequestLabels()
        self._socket = CoreSocket(
            context, runtime_dir, boot_id, frontend_index, self._on_message, self._on_lost
        )
        self.requests = RequestWindow(self._socket.send)
        self.questions = CoreQuestions(self._socket.send)

    def submit(
        self, requests: Sequence[EngineRequest], received_us: int | None = None
    ) -> RequestStream:
        """Hands requests to the core, in order, as the window allows; raises ApiError (503).

        `received_us` is when their HTTP request had been read, on the monotonic clock.
        """
        self.require_ready()
        return self.requests.submit(requests, received_us)

    def send_vocabulary(self, vocabulary: Vocabulary) -> None:
        """For grammars; raises ApiError (503)."""
        self.require_ready()
        self._socket.send(vocabulary)

    async def read_metrics(self) -> EngineMetrics:
        """What the core has counted up to now, for all frontends; raises ApiError (503)."""
        self.require_engine()
        return await self.questions.read_metrics()

    def abort_labels(self, labels: Sequence[str]) -> None:
        """Ends the requests with these ids in whatever frontend; raises ApiError (503)."""
        self.require_engine()
        self._socket.send(AbortLabels(labels=tuple(labels)))

    async def reset_prefix_cache(self) -> PrefixCacheEmptied:
        """Lets the core find nothing again that was computed before; raises ApiError (503)."""
        self.require_ready()
        return await self.questions.reset_prefix_cache()

    @property
    def is_busy(self) -> bool:
        return bool(self.requests.num_outstanding or self.requests.num_waiting)

    def shut_down(self) -> None:
        """Takes everything back; running streams end with an error, new requests get 503."""
        self._go_down(unavailable("The server is shutting down", "shutting_down"))
        self.requests.cancel_all(CancelReason.SHUTDOWN)

    def close(self) -> None:
        self._socket.close()

    def _on_message(self, message: CoreToFrontend) -> None:
        if isinstance(message, StepOutputs):
            self.requests.take(message.outputs)
        elif isinstance(message, Refused):
            self.requests.refuse(message)
        elif isinstance(message, EngineMetrics | PrefixCacheWasReset | Profiled):
            self.questions.answer(message)
        elif isinstance(message, AbortLabels):
            self.labels.abort(message.labels)
        else:
            self.status.set_ready(message)

    def _on_lost(self) -> None:
        if not self.status.is_down:
            num_outstanding, num_waiting = self.requests.num_outstanding, self.requests.num_waiting
            log.error("core lost", outstanding=num_outstanding, waiting=num_waiting)
        self._go_down(unavailable("The engine is gone", "engine_lost"))
        self.requests.forget_all()

    def _go_down(self, error: ApiError) -> None:
        self.status.go_down(error)
        self.questions.fail(error)
        self.requests.fail(error)
