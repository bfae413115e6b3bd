"""The core process: owns the sockets and the clock, makes no decisions (`engine.py` does).

Started by the supervisor as `python -m cearx.core`. One thread, one loop: wait for messages, take
them in, plan when nothing is in flight, send.
"""

import os
import signal
import time

import structlog
import zmq

from cearx.core.child import StartupError, SupervisorLink, endpoint, read_launch, signal_fd
from cearx.core.config import CoreLaunch, SchedulerConfig
from cearx.core.engine import Engine, EventLog, MessageRejected, NullLog
from cearx.core.events import FinishReason
from cearx.core.link import Channel, DealerLink, configure
from cearx.core.messages import (
    Cancel,
    CoreToFrontend,
    CoreToWorker,
    EngineReady,
    FrontendToCore,
    Output,
    StepOutputs,
    StepResult,
    Submit,
    WorkerReady,
    WorkerToCore,
)
from cearx.core.router_links import RouterLinks
from cearx.core.stall_watch import StallWatch
from cearx.core.trace_start import open_trace

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
        self._frontends: RouterLinks[CoreToFrontend, FrontendToCore] = RouterLinks(
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
        self._schedule_us = 0
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

    def run(self, engine: Engine, ready: EngineReady) -> None:
        while True:
            if self._stop_fd in dict(self._poller.poll(self._timeout_ms(engine))):
                numbers = self._signals()
                if signal.SIGTERM in numbers:
                    return
                if signal.SIGUSR1 in numbers:
                    log.info("SIGUSR1: pins the trace log", trace=self._spec.config.trace)
                    engine.pin_log("request")
            while (received := self._frontends.receive()) is not None:
                name, message = received
                self._take(engine, ready, self._frontend_names.index(name), message)
            while (result := self._worker.receive()) is not None:
                if isinstance(result, StepResult):
                    self._finish(engine, result)
            if engine.wants_step:
                start_ns = time.monotonic_ns()
                step = engine.next_step(start_ns // 1000)
                self._schedule_us = (time.monotonic_ns() - start_ns) // 1000
                self._worker.send(step)
            engine.flush_log()
            self._worker.flush()
            for name in self._frontends.flush():
                log.error("frontend lost, its requests are cancelled", frontend=name)
                engine.cancel_frontend(self._frontend_names.index(name))
            engine.maintain_log()  # last: nobody waits for the core here
            self._look_for_stall(engine)

    def _timeout_ms(self, engine: Engine) -> int | None:
        if self._frontends.has_pending or self._worker.has_pending:
            return RETRY_MS
        return STALL_CHECK_MS if engine.num_requests else None

    def _signals(self) -> bytes:
        """The numbers of the signals that arrived."""
        return os.read(self._stop_fd, 4096)

    def _look_for_stall(self, engine: Engine) -> None:
        waited = self._stalls.check(time.monotonic(), engine.num_requests > 0, engine.num_progress)
        if waited is None:
            return
        log.error("stalled: nothing happens", seconds=round(waited, 1), state=engine.describe())
        if not self._is_stall_pinned:
            self._is_stall_pinned = True
            engine.pin_log("stall")

    def _take(
        self, engine: Engine, ready: EngineReady, frontend_index: int, message: FrontendToCore
    ) -> None:
        if isinstance(message, Submit):
            try:
                refused = engine.submit(frontend_index, message)
            except MessageRejected as error:
                log.error("submit rejected", frontend=frontend_index, reason=str(error))
                failed = Output(
                    request_key=message.request_key,
                    token_ids=(),
                    logprobs=None,
                    finish_reason=FinishReason.FAILED,
                    stop_token_id=None,
                    num_cached_tokens=None,
                )
                self._frontends.send(
                    self._frontend_names[frontend_index], StepOutputs(outputs=(failed,))
                )
            else:
                if refused is not None:
                    self._send(frontend_index, refused)
        elif isinstance(message, Cancel):
            engine.cancel(frontend_index, message)
        else:
            self._send(frontend_index, ready)

    def _send(self, frontend_index: int, message: CoreToFrontend) -> None:
        self._frontends.send(self._frontend_names[frontend_index], message)

    def _finish(self, engine: Engine, result: StepResult) -> None:
        for row in result.rows:
            if row.error is not None:
                log.error("request failed in the worker", request=row.request_id, reason=row.error)
        try:
            outputs = engine.finish_step(result, self._schedule_us)
        except MessageRejected as error:
            log.error("step result dropped", reason=str(error))
            return
        for frontend_index, batch in outputs.items():
            self._frontends.send(
                self._frontend_names[frontend_index], StepOutputs(outputs=tuple(batch))
            )


def main() -> int:
    spec = read_launch(CoreLaunch)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    supervisor = SupervisorLink(context, spec, "core")
    process = CoreProcess(spec, context)
    supervisor.progress("waiting for the worker")
    worker = process.wait_for_worker()
    if worker is None:
        return 0
    try:
        config = SchedulerConfig(
            block_size=worker.block_size,
            num_blocks=worker.num_blocks,
            max_model_len=worker.max_model_len,
            max_num_seqs=spec.config.max_num_seqs,
            max_num_batched_tokens=spec.config.max_num_batched_tokens,
            enable_prefix_caching=spec.config.enable_prefix_caching,
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
    )
    try:
        process.run(Engine(config, spec.hash_secret, event_log), ready)
    except BaseException:
        if trace is not None:
            trace.close(is_orderly=False)  # what led here is in the log
        raise
    if trace is not None:
        trace.close()
    context.destroy(linger=0)
    return 0
