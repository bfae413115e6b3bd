"""The core process: owns the sockets and the clock, makes no decisions (`engine.py` does).

Started by the supervisor as `python -m cearx.core`. One thread, one loop: wait for messages, take
them in, plan as many steps ahead as there may be, send.
"""

import gc
import os
import signal
import time

import structlog
import zmq

from cearx.core.admission import load_policy
from cearx.core.books import Books
from cearx.core.child import StartupError, SupervisorLink, endpoint, read_launch, signal_fd
from cearx.core.config import CoreLaunch, scheduler_config
from cearx.core.engine import Engine
from cearx.core.event_log import EventLog, NullLog
from cearx.core.frontend_desk import FrontendDesk, Links
from cearx.core.link import Channel, DealerLink, configure
from cearx.core.live_requests import MessageRejected
from cearx.core.messages import (
    CoreToWorker,
    EngineReady,
    FrontendToCore,
    GrammarPrepared,
    Profiled,
    StepResult,
    WorkerReady,
    WorkerToCore,
)
from cearx.core.metrics_fold import MeteredLog, MetricsFold
from cearx.core.plan_timing import PlanTiming
from cearx.core.router_links import RouterLinks
from cearx.core.stall_watch import StallWatch
from cearx.core.step_times import StepTimes, step_note
from cearx.core.trace_start import open_trace, require_folder

RETRY_MS = 5
"""How soon a message that a peer could not take is offered again."""
STALL_CHECK_MS = 1000
"""How often a stall is looked for while requests are live and nothing arrives."""

log = structlog.get_logger()


class CoreProcess:
    """Sockets and loop; `run` returns when the supervisor asks for the end."""

    def __init__(self, spec: CoreLaunch, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._spec = spec
        self._frontend_names = [f"frontend-{index}" for index in range(spec.frontends)]
        self._frontends: Links = RouterLinks(
            context,
            endpoint(spec.runtime_dir, "frontends"),
            spec.boot_id,
            self._frontend_names,
            FrontendToCore,
        )
        socket = context.socket(zmq.DEALER)
        configure(socket)
        socket.bind(endpoint(spec.runtime_dir, "worker"))
        self._worker: DealerLink[CoreToWorker, WorkerToCore] = DealerLink(
            socket, Channel(spec.boot_id, 0, WorkerToCore)
        )
        self._stop_fd = signal_fd(signal.SIGTERM, signal.SIGUSR1)
        self._poller = zmq.Poller()
        for waitable in (socket, self._frontends.socket, self._stop_fd):
            self._poller.register(waitable, zmq.POLLIN)
        self._times = StepTimes()
        self._timing = PlanTiming()
        self._stalls = StallWatch()
        self._is_stall_pinned = False

    def wait_for_worker(self) -> WorkerReady | None:
        """The worker's sizes, or None when the end was asked for first."""
        while True:
            if self._stop_fd in dict(self._poller.poll()) and signal.SIGTERM in self._signals():
                return None
            message = self._worker.receive()
            if isinstance(message, WorkerReady):
                return message

    def open_desk(self, engine: Engine, ready: EngineReady, metrics: MetricsFold) -> FrontendDesk:
        """From here on frontends are answered."""
        return FrontendDesk(
            self._frontends,
            self._frontend_names,
            engine,
            ready,
            metrics,
            send_to_worker=self._worker.send,
            on_arrival=self._timing.arrived,
        )

    def run(self, engine: Engine, desk: FrontendDesk) -> None:
        while True:
            if self._stop_fd in dict(self._poller.poll(self._poll_ms(engine))):
                numbers = self._signals()
                if signal.SIGTERM in numbers:
                    return
                if signal.SIGUSR1 in numbers:
                    log.info("SIGUSR1: pins the trace log", trace=self._spec.config.trace)
                    engine.log.pin("request")
            desk.take_messages()
            self._take_results(engine, desk)
            self._plan(engine, desk)
            engine.log.flush()
            self._worker.flush()
            desk.flush()
            engine.log.maintain(engine.scheduler.snapshot)  # last: nobody waits for the core here
            self._look_for_stall(engine)

    def _signals(self) -> bytes:
        """The numbers of the signals that arrived."""
        return os.read(self._stop_fd, 4096)

    def _look_for_stall(self, engine: Engine) -> None:
        waited = self._stalls.check(time.monotonic(), engine.num_requests > 0, engine.num_progress)
        if waited is None:
            return
        log.error(
            "stalled: nothing happens",
            seconds=round(waited, 1),
            state=_describe(engine.scheduler.books),
        )
        if not self._is_stall_pinned:
            self._is_stall_pinned = True
            engine.log.pin("stall")

    def _poll_ms(self, engine: Engine) -> int | None:
        """How long to wait for messages at most, None for as long as it takes."""
        if self._frontends.has_pending or self._worker.has_pending:
            return RETRY_MS
        if not engine.num_requests:
            return None
        wait_ms = STALL_CHECK_MS
        if engine.wants_step:
            wait_ms = self._hold_ms()
        deadline_us = engine.scheduler.next_deadline_us
        if deadline_us is None:
            return wait_ms
        return min(max((deadline_us - _now_us()) // 1000 + 1, 0), wait_ms)

    def _hold_ms(self) -> int:
        """How long the next plan waits for who may come, in what the poller can wait."""
        return self._timing.hold_us(_now_us()) // 1000

    def _plan(self, engine: Engine, desk: FrontendDesk) -> None:
        """Tells the time when it matters, and keeps as many steps in flight as there may be."""
        deadline_us = engine.scheduler.next_deadline_us
        while (may_plan := engine.wants_step and not self._hold_ms()) or (
            deadline_us is not None and deadline_us <= _now_us()
        ):
            start_us = _now_us()
            desk.send_outputs(engine.tick(start_us))
            deadline_us = engine.scheduler.next_deadline_us
            step = engine.next_step() if may_plan and engine.wants_step else None
            if step is not None:
                planned_us = _now_us()
                engine.log.flush()
                logged_us = _now_us()
                self._worker.send(step)
                self._times.sent(step.plan, start_us, planned_us, logged_us)
                self._timing.sent(logged_us)

    def _take_results(self, engine: Engine, desk: FrontendDesk) -> None:
        while (result := self._worker.receive()) is not None:
            if isinstance(result, StepResult):
                self._finish(engine, desk, result)
            elif isinstance(result, GrammarPrepared):
                desk.let_in(result)
            elif isinstance(result, Profiled):
                desk.tell_profiled(result)

    def _finish(self, engine: Engine, desk: FrontendDesk, result: StepResult) -> None:
        for row in result.rows:
            if row.error is not None:
                log.error("request failed in the worker", request=row.request_id, reason=row.error)
        taken_us = _now_us()
        try:
            outputs = engine.finish_step(result)
        except MessageRejected as error:
            log.error("step result dropped", reason=str(error))
            return
        applied_us, delivered_us = _now_us(), None
        step = self._times.finished()
        self._timing.finished(taken_us, result.execute_us)
        desk.send_outputs(outputs)
        if step.samples_prompts:  # first tokens do not wait for the next plan
            engine.log.flush()
            desk.flush()
            delivered_us = _now_us()
        engine.log.append(
            step_note(
                step, result, taken_us=taken_us, applied_us=applied_us, delivered_us=delivered_us
            )
        )


def _describe(books: Books) -> str:
    """Where the scheduler stands, for a log line: counts only."""
    return (
        f"{len(books.running)} running, {len(books.waiting)} waiting,"
        f" {len(books.steps.in_flight)} steps in flight"
    )


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def main() -> int:
    spec = read_launch(CoreLaunch)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    supervisor = SupervisorLink(context, spec, "core")
    try:  # before anybody waits for a model to load
        load_policy(spec.config.admission)
        require_folder(spec.config)
    except (ValueError, StartupError) as error:
        supervisor.failed(str(error))
        return 2
    process = CoreProcess(spec, context)
    supervisor.progress("waiting for the worker")
    worker = process.wait_for_worker()
    if worker is None:
        return 0
    # Where prompts bring vectors, a prompt may fill the context: its output is no token of it.
    num_free = 0 if spec.generates else 1
    try:
        config = scheduler_config(
            spec.config,
            block_size=worker.block_size,
            num_blocks=worker.num_blocks,
            max_model_len=worker.max_model_len + num_free,
            max_num_seqs=worker.max_num_seqs,
            max_num_batched_tokens=worker.max_num_batched_tokens,
        )
        trace = open_trace(spec, config)
    except (StartupError, ValueError) as error:
        supervisor.failed(str(error))
        return 2
    event_log: EventLog = NullLog() if trace is None else trace
    supervisor.ready("" if trace is None else f"trace log: {trace.path}")
    ready = EngineReady(
        max_model_len=worker.max_model_len,
        block_size=worker.block_size,
        num_blocks=worker.num_blocks,
        vocab_size=worker.vocab_size,
        enable_prefix_caching=config.enable_prefix_caching,
        has_priorities=config.scheduling_policy == "priority",
        embedding_size=worker.embedding_size,
        has_profiler=worker.has_profiler,
    )
    try:
        metrics = MetricsFold(config.max_model_len, generates=spec.generates)
        metered = MeteredLog(event_log, metrics, _now_us)
        engine = Engine(config, spec.hash_secret, metered)
        gc.collect()
        gc.freeze()  # what start-up made lives for ever: no collection, no step's pause, visits it
        process.run(engine, process.open_desk(engine, ready, metrics))
    except BaseException:
        if trace is not None:
            trace.close(is_orderly=False)  # what led here is in the log
        raise
    if trace is not None:
        trace.close()
    context.destroy(linger=0)
    return 0
