"""The worker process: starts the model, then answers one step after the other.

Owns start-up, the socket to the core and the loop. Never decides what is computed. Started by the
supervisor as `python -m cearx.worker`; one thread (beside torch's), which sleeps in `poll` while
no step runs. Exit code 0 after SIGTERM, 2 for what could never start, 1 for a step that failed.
"""

import gc
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog
import torch
import zmq

from cearx.core.child import StartupError, SupervisorLink, endpoint, read_launch, signal_fd
from cearx.core.config import WorkerLaunch
from cearx.core.link import LINGER_MS, Channel, DealerLink, configure
from cearx.core.machine import available_cores, free_memory
from cearx.core.messages import (
    CoreToWorker,
    ExecuteStep,
    Profile,
    StepResult,
    WorkerReady,
    WorkerToCore,
)
from cearx.worker.batch_inputs import BatchInputsBuilder
from cearx.worker.device import StepSizes, choose_device, choose_sizes
from cearx.worker.grammar_table import GrammarTable
from cearx.worker.kv_cache import KVCache, kv_type
from cearx.worker.memory_plan import (
    MemoryPlan,
    memory_table,
    plan_memory,
    size_text,
    weights_text,
)
from cearx.worker.model_config import ModelConfig
from cearx.worker.model_loader import LoadedModel, load_model
from cearx.worker.profiler import StepProfiler
from cearx.worker.request_states import RequestStates
from cearx.worker.sampler import Sampler
from cearx.worker.seats import SeatTable
from cearx.worker.step_runner import StepRunner
from cearx.worker.warm_up import warm_up
from cearx.worker.warm_up_step import PROBES

RETRY_MS = 5
"""How soon a message that the core could not take is offered again."""
EXIT_FAULT = 1
EXIT_CANNOT_START = 2

log = structlog.get_logger()


class Runner(Protocol):
    """What runs the steps; results come in the order of launches."""

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and not collected."""
        ...

    @property
    def grammars(self) -> GrammarTable:
        """What the requests' grammars are compiled in."""
        ...

    def launch(self, step: ExecuteStep) -> None:
        """Starts a step. An exception means that no further step can be trusted."""
        ...

    def collect(self) -> StepResult | None:
        """The oldest step's result if it is there; never waits."""
        ...


@dataclass(frozen=True)
class StartedWorker:
    """What start-up leaves behind."""

    runner: Runner
    ready: WorkerReady
    memory_table: str


def main() -> int:
    """Runs the worker to its end; answers the exit code."""
    spec = read_launch(WorkerLaunch)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    supervisor = SupervisorLink(context, spec, "worker")
    try:
        return _run(spec, context, supervisor)
    finally:
        context.destroy(linger=LINGER_MS)


def _run(
    spec: WorkerLaunch, context: zmq.Context[zmq.Socket[bytes]], supervisor: SupervisorLink
) -> int:
    torch.set_num_threads(spec.config.num_threads or available_cores())
    torch.set_num_interop_threads(1)
    try:
        profiler = StepProfiler(spec.config.profiler_folder, choose_device(spec.config))
        worker = start(spec, supervisor.progress)
    except StartupError as error:
        supervisor.failed(str(error))
        return EXIT_CANNOT_START
    except Exception as error:
        log.exception("start-up failed")
        supervisor.failed(f"start-up failed: {_one_line(error)}")
        return EXIT_CANNOT_START
    supervisor.ready(worker.memory_table)
    try:
        if spec.config.profile is not None:
            profiler.start()
        serve(spec, context, worker, profiler)
        profiler.close()
    except Exception as error:
        # Nobody knows what the failed step left in the KV cache, so nothing can go on from it.
        log.exception("step failed")
        supervisor.failed(f"a step failed: {_one_line(error)}")
        return EXIT_FAULT
    return 0


def start(spec: WorkerLaunch, progress: Callable[[str, int, int], None]) -> StartedWorker:
    """Loads, sizes, allocates and warms up. Raises StartupError for what the person can mend."""
    device = choose_device(spec.config)
    sizes = choose_sizes(spec, device)
    start_on = _start_cuda if device.type == "cuda" else _start_cpu
    worker = start_on(spec, sizes, device, progress)
    gc.collect()
    gc.freeze()  # what start-up made lives for ever; no collection needs to look at it again
    return worker


def _start_cuda(
    spec: WorkerLaunch,
    sizes: StepSizes,
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> StartedWorker:
    from cearx.worker.cuda.start import start_cuda  # imports Triton, which the CPU does not need

    started = start_cuda(spec, sizes, device, progress)
    ready = _ready(spec, sizes, started.config, started.num_blocks, started.max_model_len)
    return StartedWorker(started.runner, ready, started.memory_table)


def _start_cpu(
    spec: WorkerLaunch,
    sizes: StepSizes,
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> StartedWorker:
    config = spec.config
    progress("loading weights", 0, 0)
    loaded = load_model(
        spec.model, config, lambda done, total: progress("loading weights", done, total)
    )
    log.info(weights_text(loaded.bytes_by_form))
    kv_type(config.kv_cache_dtype, loaded.dtype, device)
    memory = plan_memory(
        config,
        loaded.config,
        loaded.dtype,
        block_size=sizes.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        weight_bytes=loaded.weight_bytes,
        free_bytes=free_memory(),
    )
    runner = _build_runner(sizes, loaded, memory)
    progress("warming up", 0, 0)
    warm_up(
        runner,
        num_blocks=memory.num_blocks,
        block_size=memory.block_size,
        max_model_len=memory.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        pooling=PROBES.get(spec.model.task),
    )
    ready = _ready(spec, sizes, loaded.config, memory.num_blocks, memory.max_model_len)
    return StartedWorker(runner, ready, memory_table(memory))


def _ready(
    spec: WorkerLaunch, sizes: StepSizes, model: ModelConfig, num_blocks: int, max_model_len: int
) -> WorkerReady:
    return WorkerReady(
        num_blocks=num_blocks,
        block_size=sizes.block_size,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        embedding_size=model.hidden_size if spec.model.task == "embed" else None,
        has_profiler=spec.config.profiler_folder is not None,
    )


def _build_runner(sizes: StepSizes, loaded: LoadedModel, memory: MemoryPlan) -> StepRunner:
    """Allocates the KV pool and everything else whose size is known now."""
    try:
        kv_cache = KVCache(loaded.config, memory.num_blocks, memory.block_size, loaded.dtype)
    except (RuntimeError, MemoryError) as error:
        raise StartupError(
            f"the KV pool of {size_text(memory.kv_bytes)} ({memory.num_blocks} blocks) cannot be "
            f"allocated, {size_text(free_memory())} are free; give it less memory or fewer blocks"
        ) from error
    vocab_size = loaded.config.vocab_size
    seats = SeatTable(sizes.max_num_seqs, memory.max_model_len, memory.block_size)
    states = RequestStates(seats, vocab_size)
    inputs = BatchInputsBuilder(states, sizes.max_num_seqs, sizes.max_num_batched_tokens)
    return StepRunner(loaded.model, kv_cache, states, inputs, Sampler(vocab_size))


def serve(
    spec: WorkerLaunch,
    context: zmq.Context[zmq.Socket[bytes]],
    worker: StartedWorker,
    profiler: StepProfiler,
) -> None:
    """Announces the sizes, then executes steps until SIGTERM; raises what a step raises."""
    socket = context.socket(zmq.DEALER)
    configure(socket)
    socket.connect(endpoint(spec.runtime_dir, "worker"))
    link: DealerLink[WorkerToCore, CoreToWorker] = DealerLink(
        socket, Channel(spec.boot_id, 0, CoreToWorker)
    )
    stop_fd = signal_fd(signal.SIGTERM)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(stop_fd, zmq.POLLIN)
    grammars = worker.runner.grammars
    poller.register(grammars.wake_fd, zmq.POLLIN)
    link.send(worker.ready)
    num_dropped = 0
    runner = worker.runner
    received: deque[int] = deque()
    """When each of the steps in flight had come."""
    while stop_fd not in dict(poller.poll(_wait_ms(runner, link.has_pending))):
        message = link.receive()
        if isinstance(message, ExecuteStep):
            received.append(_now_us())
            with profiler.step(message):
                runner.launch(message)
        elif isinstance(message, Profile):
            link.send(profiler.take(message))
        elif message is not None:
            grammars.take(message)
        while (result := runner.collect()) is not None:
            link.send(
                msgspec.structs.replace(result, received_us=received.popleft(), sent_us=_now_us())
            )
        for prepared in grammars.finished():
            link.send(prepared)
        link.flush()
        if runner.num_in_flight:
            # This loop never sleeps; whom a result wakes on this very core would wait for its slice
            # to end, some milliseconds.
            os.sched_yield()
        counters = link.channel.counters
        dropped = counters.malformed + counters.foreign + counters.stale
        if dropped != num_dropped:
            num_dropped = dropped
            log.warning(
                "messages dropped",
                malformed=counters.malformed,
                foreign=counters.foreign,
                stale=counters.stale,
            )


def _wait_ms(runner: Runner, has_pending: bool) -> int | None:
    """How long to sleep for a message: not at all while a step runs, to see its end at once."""
    if runner.num_in_flight:
        return 0
    return RETRY_MS if has_pending else None


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def _one_line(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
