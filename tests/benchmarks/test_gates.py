"""Performance gates: what the core does in every step may not become slower than it was.

Machines differ, so a gate holds a ratio: the best time of the operation over the best time of a
plain Python loop that runs before and after it in the same process. `pytest --benchmark-only`
shows the times; `--update-gates` stores new ratios, to be reviewed like any other change.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from cearx.core.block_hash import prompt_hashes, root_hash
from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    CancelReason,
    CancelRequested,
    ClockAdvanced,
    RequestArrived,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import BlockHash, RequestId, RequestKey
from cearx.core.link import Channel
from cearx.core.messages import (
    CoreToFrontend,
    CoreToWorker,
    ExecuteStep,
    Output,
    StepOutputs,
    pack_tokens,
)
from cearx.core.scheduler import Scheduler
from cearx.core.trace_records import StepNote
from cearx.core.trace_writer import TraceWriter
from cearx.replay.trace import Trace
from cearx.replay.verify import Verifier, fresh_scheduler

RATIOS = Path(__file__).parent / "ratios.json"
ALLOWANCE = 1.2
"""A gate fails when it is this much slower than its stored ratio."""
TRIES = 4
"""A busy moment may slow one try; a regression slows all of them."""
ROUNDS = 60
BLOCK_SIZE = 16
NOTE = StepNote(
    execute_us=5000,
    schedule_us=50,
    log_us=30,
    receive_us=90,
    launch_us=200,
    device_us=4900,
    transfer_us=9,
    result_us=150,
    turn_us=9800,
    apply_us=40,
)


def reference_loop() -> int:
    """A fixed piece of work of the kind that the scheduler does: integers, dicts, attributes."""
    table: dict[int, int] = {}
    for value in range(2000):
        table[value % 97] = table.get(value % 89, 0) + value
    return sum(table.values())


def best_seconds(work: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


class Gate:
    """Measures an operation beside the reference loop and holds it to its stored ratio."""

    def __init__(self, benchmark: BenchmarkFixture, name: str, update: bool) -> None:
        self._benchmark = benchmark
        self._name = name
        self._update = update

    def hold(self, work: Callable[[], object], operations: int = 1) -> None:
        """`work` does `operations` of what the gate is about; raises AssertionError when slow."""
        stored: dict[str, float] = msgspec.json.decode(RATIOS.read_bytes())
        ratio = self._ratio(work) / operations
        tries = 1
        while self._is_slow(ratio, stored) and tries < TRIES:
            ratio = min(ratio, self._ratio(work) / operations)
            tries += 1
        self._benchmark.extra_info["ratio"] = ratio
        self._benchmark.pedantic(work, rounds=5)
        if self._update:
            stored[self._name] = round(ratio, 4)
            text = msgspec.json.format(msgspec.json.encode(dict(sorted(stored.items()))))
            RATIOS.write_bytes(text + b"\n")
            return
        assert not self._is_slow(ratio, stored), (
            f"{self._name} takes {ratio:.4f} reference loops, stored are {stored[self._name]:.4f}"
            f" and {ALLOWANCE:.1f} times that is allowed"
        )

    def _is_slow(self, ratio: float, stored: dict[str, float]) -> bool:
        return not self._update and ratio > stored[self._name] * ALLOWANCE

    def _ratio(self, work: Callable[[], object]) -> float:
        work()
        before = best_seconds(reference_loop, ROUNDS)
        seconds = best_seconds(work, ROUNDS)
        return seconds / min(before, best_seconds(reference_loop, ROUNDS))


@pytest.fixture
def gate(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Gate:
    """The gate of the running test, named as the test is."""
    update = request.config.getoption("--update-gates")
    return Gate(benchmark, request.node.name.removeprefix("test_"), update)


def config(num_running: int) -> SchedulerConfig:
    return SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_running * 64 + 1024,
        max_model_len=8192,
        max_num_seqs=num_running,
        max_num_batched_tokens=8192 + num_running,
        enable_prefix_caching=True,
    )


def arrival(
    request_id: int, num_tokens: int, hashes: tuple[BlockHash, ...], arrived_us: int = 0
) -> RequestArrived:
    return RequestArrived(
        request_id=RequestId(request_id),
        num_prompt_tokens=num_tokens,
        max_tokens=900,
        block_hashes=hashes,
        frontend_index=0,
        arrived_us=arrived_us,
        priority=0,
        has_exact_length=True,
    )


class Stepper:
    """A scheduler with `num_running` requests in decode; each call is one step."""

    def __init__(self, num_running: int) -> None:
        self.scheduler = Scheduler(config(num_running))
        self.now_us = 0
        for index in range(num_running):
            self.scheduler.apply(arrival(index, 8, ()))
        while len(self.scheduler.books.waiting):
            self()
        self()

    def __call__(self) -> StepPlan:
        self.now_us += 1000
        self.scheduler.apply(ClockAdvanced(now_us=self.now_us))
        plan = self.scheduler.plan()
        assert plan is not None
        self.scheduler.apply(
            StepFinished(step_id=plan.step_id, stopped=(), sealed=(), execute_us=5000)
        )
        return plan


@pytest.mark.parametrize("num_running", [1, 64, 256, 1024])
def test_scheduler_step(gate: Gate, num_running: int) -> None:
    """Plan a step and take its result, with every request in decode."""
    gate.hold(Stepper(num_running))


def test_admission_of_4096_tokens(gate: Gate) -> None:
    """Arrival, plan and cancel of one prompt of 256 blocks."""
    packed = pack_tokens(list(range(4096)))
    hashes = prompt_hashes(bytes(32), root_hash(bytes(32), None), packed, BLOCK_SIZE)
    scheduler = Scheduler(config(8))
    next_id = iter(range(1, 1_000_000))

    def admit() -> None:
        scheduler.apply(arrival(next(next_id), 4096, hashes))
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(StepFinished(step_id=plan.step_id, stopped=(), sealed=(), execute_us=5000))
        request_id = plan.admitted[0].request_id
        scheduler.apply(CancelRequested(request_id=request_id, reason=CancelReason.DISCONNECT))

    gate.hold(admit)


def test_prefix_lookup(gate: Gate) -> None:
    """Find the 256 cached blocks of a 4,096-token prompt."""
    packed = pack_tokens(list(range(4096)))
    hashes = prompt_hashes(bytes(32), root_hash(bytes(32), None), packed, BLOCK_SIZE)
    scheduler = Scheduler(config(8))
    blocks = scheduler.books.pool.take(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        scheduler.books.pool.publish(block, block_hash)
    assert len(scheduler.books.pool.index.find(hashes, 255)) == 255
    gate.hold(lambda: scheduler.books.pool.index.find(hashes, 255))


def test_prompt_hashes_of_4096_tokens(gate: Gate) -> None:
    """What the frontend computes of a prompt before it submits it."""
    packed = pack_tokens(list(range(4096)))
    root = root_hash(bytes(32), None)
    gate.hold(lambda: prompt_hashes(bytes(32), root, packed, BLOCK_SIZE))


def test_log_append(gate: Gate, tmp_path: Path) -> None:
    """The records of one step at 64 running, and the write that makes them safe."""
    stepper = Stepper(64)
    writer = TraceWriter.open(tmp_path, config(64), 1, pytest.fail)
    plan = stepper()
    finished = StepFinished(step_id=plan.step_id, stopped=(), sealed=(), execute_us=5000)

    def append() -> None:
        writer.append(finished)
        writer.append(ClockAdvanced(now_us=stepper.now_us))
        writer.append(plan)
        writer.append(NOTE)
        writer.flush()

    gate.hold(append)
    writer.close()


def test_step_message(gate: Gate) -> None:
    """Encode and decode the message of one step at 64 running."""
    step = ExecuteStep(plan=Stepper(64)(), new_requests=(), ended=())
    sender: Channel[CoreToWorker, object] = Channel(1, 0, object)
    receiver: Channel[object, CoreToWorker] = Channel(1, 0, CoreToWorker)
    gate.hold(lambda: receiver.decode(sender.encode(step)))


def test_outputs_message(gate: Gate) -> None:
    """Encode and decode what 64 requests got in one step."""
    outputs = StepOutputs(
        outputs=tuple(
            Output(
                request_key=RequestKey(key),
                token_ids=(key,),
                logprobs=None,
                finish_reason=None,
                stop_token_id=None,
                num_cached_tokens=None,
            )
            for key in range(64)
        )
    )
    sender: Channel[CoreToFrontend, object] = Channel(1, 0, object)
    receiver: Channel[object, CoreToFrontend] = Channel(1, 0, CoreToFrontend)
    gate.hold(lambda: receiver.decode(sender.encode(outputs)))


def test_replay(gate: Gate, tmp_path: Path) -> None:
    """Verify a trace, per step at 64 running."""
    num_steps = 200
    scheduler = Scheduler(config(64))
    writer = TraceWriter.open(tmp_path, scheduler.config, 1, pytest.fail)
    for index in range(64):
        event = arrival(index, 8, ())
        writer.append(event)
        scheduler.apply(event)
    for step in range(num_steps):
        clock = ClockAdvanced(now_us=step)
        writer.append(clock)
        scheduler.apply(clock)
        plan = scheduler.plan()
        assert plan is not None
        writer.append(plan)
        finished = StepFinished(step_id=plan.step_id, stopped=(), sealed=(), execute_us=5000)
        writer.append(finished)
        scheduler.apply(finished)
    writer.close()

    def verify() -> None:
        trace = Trace.open(tmp_path)
        verifier = Verifier(fresh_scheduler(trace.header.config))
        assert all(verifier.feed(record) is None for record in trace.records())

    gate.hold(verify, operations=num_steps)
