"""What one turn of the core costs for a decode batch in which nothing changes, part by part.

Owns a measurement, not a test: run it by hand on a quiet machine. The engine with its trace log
and the codecs of its messages, two steps in flight, no sockets: what a plan for several steps at
once could save stands in the columns `plan` and `message`, what it could not in the others.

    python tests/benchmarks/core_turn.py
"""

import itertools
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import median

from cearx.core.block_hash import root_hash
from cearx.core.config import SchedulerConfig
from cearx.core.engine import Engine
from cearx.core.events import StepPlan
from cearx.core.identifiers import RequestKey
from cearx.core.link import Channel
from cearx.core.messages import (
    CoreToFrontend,
    CoreToWorker,
    RowOutput,
    SamplingParams,
    StepOutputs,
    StepResult,
    Submit,
    WorkerToCore,
    pack_tokens,
)
from cearx.core.trace_records import StepNote
from cearx.core.trace_writer import TraceWriter

SECRET = bytes(32)
BLOCK_SIZE = 64
NUM_STEPS = 2000
NOTE = StepNote(execute_us=7900, schedule_us=50, device_us=7800, turn_us=16_000)
PARTS = ("receive", "apply", "outputs", "plan", "message")
"""Decode the worker's result; take it in; encode what frontends get; plan and log the next step;
encode it."""


def result_of(plan: StepPlan) -> StepResult:
    rows = [*plan.decodes, *(chunk.request_id for chunk in plan.chunks if chunk.samples)]
    return StepResult(
        step_id=plan.step_id,
        rows=tuple(RowOutput(request_id=r, token_id=7, logprobs=None, error=None) for r in rows),
        execute_us=7900,
    )


def turns(num_running: int, folder: Path) -> list[list[float]]:
    """Microseconds of the five parts of each turn that only decodes."""
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_running * 40,
        max_model_len=4096,
        max_num_seqs=num_running,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        pipeline_depth=2,
    )
    log = TraceWriter.open(folder, config, 1, print)
    engine = Engine(config, SECRET, log)
    for key in range(num_running):
        submit = Submit(
            request_key=RequestKey(key),
            token_ids=pack_tokens([3] * 33),
            block_hashes=(),
            cache_root=root_hash(SECRET, None),
            max_tokens=2400,
            sampling=SamplingParams(),
            has_exact_length=True,
        )
        assert engine.submit(0, submit, 0) is None
    worker: Channel[WorkerToCore, object] = Channel(1, 0, object)
    to_worker: Channel[CoreToWorker, WorkerToCore] = Channel(1, 0, WorkerToCore)
    to_frontend: Channel[CoreToFrontend, object] = Channel(1, 0, object)
    in_flight: deque[StepPlan] = deque()
    measured: list[list[float]] = []
    for index in range(NUM_STEPS):
        if len(in_flight) < 2:
            engine.tick(index * 8000)
            step = engine.next_step()
            assert step is not None
            in_flight.append(step.plan)
            continue
        frame = worker.encode(result_of(in_flight.popleft()))
        times = [time.perf_counter_ns()]
        result = to_worker.decode(frame)
        assert isinstance(result, StepResult)
        times.append(time.perf_counter_ns())
        outputs = engine.finish_step(result)
        engine.log.append(NOTE)
        times.append(time.perf_counter_ns())
        for batch in outputs.values():
            to_frontend.encode(StepOutputs(outputs=tuple(batch)))
        times.append(time.perf_counter_ns())
        engine.tick(index * 8000)
        step = engine.next_step()
        engine.log.flush()
        times.append(time.perf_counter_ns())
        assert step is not None, f"nothing to plan at step {index}"
        to_worker.encode(step)
        times.append(time.perf_counter_ns())
        in_flight.append(step.plan)
        if not (step.plan.chunks or step.plan.granted):
            measured.append([(b - a) / 1000 for a, b in itertools.pairwise(times)])
    log.close()
    return measured


def main() -> None:
    print(f"{'running':<8}" + "".join(f"{part:>9}" for part in PARTS) + f"{'turn us':>9}")
    for num_running in (1, 16, 64, 256):
        with tempfile.TemporaryDirectory() as folder:
            measured = turns(num_running, Path(folder))
        parts = [median(column) for column in zip(*measured, strict=True)]
        print(f"{num_running:<8}" + "".join(f"{us:>9.1f}" for us in [*parts, sum(parts)]))


if __name__ == "__main__":
    main()
