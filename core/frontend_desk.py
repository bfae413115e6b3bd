"""The core's desk for its frontends: what they ask for, and what they are told.

Owns the links to them, the requests that wait for a grammar, and the answers that need no step.
Messages leave with `flush`, behind what they follow from in the log. Called by `process.py`.
"""

import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from cearx.core.books import Books
from cearx.core.engine import Engine
from cearx.core.events import FinishReason
from cearx.core.grammar_waits import GrammarWaits
from cearx.core.live_requests import MessageRejected
from cearx.core.messages import (
    AbortLabels,
    Cancel,
    CoreToFrontend,
    CoreToWorker,
    EngineMetrics,
    EngineReady,
    FrontendToCore,
    GrammarPrepared,
    Output,
    PrefixCacheWasReset,
    Profile,
    Profiled,
    ReadMetrics,
    ResetPrefixCache,
    StepOutputs,
    Submit,
    Vocabulary,
)
from cearx.core.metrics import EngineLoad
from cearx.core.metrics_fold import MetricsFold
from cearx.core.router_links import RouterLinks
from cearx.core.step_outputs import ended_output

Links = RouterLinks[CoreToFrontend, FrontendToCore]

log = structlog.get_logger()


class FrontendDesk:
    """See the module docstring."""

    def __init__(
        self,
        links: Links,
        names: Sequence[str],
        engine: Engine,
        ready: EngineReady,
        metrics: MetricsFold,
        send_to_worker: Callable[[CoreToWorker], None],
        on_arrival: Callable[[int], None],
    ) -> None:
        """`names` of the links by index; `on_arrival` hears when a request comes, in us."""
        self._links = links
        self._names = names
        self._engine = engine
        self._ready = ready
        self._metrics = metrics
        self._send_to_worker = send_to_worker
        self._on_arrival = on_arrival
        self._grammar_waits = GrammarWaits()

    def take_messages(self) -> None:
        """All that have arrived."""
        while (received := self._links.receive()) is not None:
            name, message = received
            index = self._names.index(name)
            if isinstance(message, Submit) and self._grammar_waits.must_wait(message):
                self._send_to_worker(self._grammar_waits.hold(index, message))
            elif isinstance(message, Submit):
                self._submit(index, message)
            else:
                self._take(index, message)

    def let_in(self, prepared: GrammarPrepared) -> None:
        """A request arrives when its grammar is there."""
        held = self._grammar_waits.release(prepared)
        if held is None:  # taken back meanwhile
            return
        frontend_index, submit = held
        if prepared.error is None:
            self._submit(frontend_index, submit)
            return
        log.error("grammar failed in the worker", reason=prepared.error)
        failed = ended_output(submit.request_key, FinishReason.FAILED)
        failed = msgspec.structs.replace(failed, is_grammar_fault=True)
        self.send_outputs({frontend_index: [failed]})

    def tell_profiled(self, profiled: Profiled) -> None:
        """The worker's answer goes to the frontend that asked."""
        self._send(profiled.frontend_index, profiled)

    def send_outputs(self, outputs: dict[int, list[Output]]) -> None:
        """What each frontend, by its index, gets of a step."""
        for frontend_index, batch in outputs.items():
            self._send(frontend_index, StepOutputs(outputs=tuple(batch)))

    def flush(self) -> None:
        """Sends what can be sent; requests of a frontend that is gone are cancelled."""
        for name in self._links.flush():
            log.error("frontend lost, its requests are cancelled", frontend=name)
            self._grammar_waits.cancel(self._names.index(name))
            self._engine.cancel_frontend(self._names.index(name))

    def _submit(self, frontend_index: int, submit: Submit) -> None:
        self._metrics.note_submit(submit.received_us, submit.num_choices)
        now_us = time.monotonic_ns() // 1000
        self._on_arrival(now_us)
        try:
            refused = self._engine.submit(frontend_index, submit, now_us)
        except MessageRejected as error:
            log.error("submit rejected", frontend=frontend_index, reason=str(error))
            failed = ended_output(submit.request_key, FinishReason.FAILED)
            self.send_outputs({frontend_index: [failed]})
        else:
            if refused is not None:
                self._send(frontend_index, refused)

    def _take(self, frontend_index: int, message: FrontendToCore) -> None:
        if isinstance(message, Cancel):
            self._grammar_waits.cancel(frontend_index, message.request_key)
            self._engine.cancel(frontend_index, message)
        elif isinstance(message, Vocabulary):
            self._send_to_worker(message)
        elif isinstance(message, Profile):
            asked = msgspec.structs.replace(message, frontend_index=frontend_index)
            self._send_to_worker(asked)
        elif isinstance(message, ReadMetrics):
            self._send(frontend_index, self._read_metrics(message.number))
        elif isinstance(message, ResetPrefixCache):
            outcome = self._engine.reset_prefix_cache()
            log.info("prefix cache reset", freed=outcome.num_freed, in_use=outcome.num_in_use)
            answer = PrefixCacheWasReset(number=message.number, outcome=outcome)
            self._send(frontend_index, answer)
        elif isinstance(message, AbortLabels):
            for index in range(len(self._names)):
                self._send(index, message)
        else:
            self._send(frontend_index, self._ready)

    def _read_metrics(self, number: int) -> EngineMetrics:
        return EngineMetrics(
            number=number,
            load=_load(self._engine.scheduler.books),
            counters=self._metrics.counters,
            histograms=self._metrics.histograms,
        )

    def _send(self, frontend_index: int, message: CoreToFrontend) -> None:
        self._links.send(self._names[frontend_index], message)


def _load(books: Books) -> EngineLoad:
    return EngineLoad(
        num_running=len(books.running),
        num_waiting=len(books.waiting),
        num_deferred=sum(request.num_pending > 0 for request in books.waiting),
        num_free_blocks=books.pool.num_free,
    )
