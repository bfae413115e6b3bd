"""What a scheduling step costs: plan it, take in its result, log both, on a quiet machine.

Owns a measurement, not a test: run it by hand. Three loads at each number of running requests: a
decode batch in which nothing changes; one in which every sixteenth request gets a block and seals
one in each step; one in which requests come and end all the time as well. Two steps in flight, the
trace log on, hashes made up beforehand.

    python tests/benchmarks/step_cost.py --steps 2000
"""

import argparse
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import mean, median, quantiles

from cearx.core.block_hash import DIGEST_SIZE
from cearx.core.config import SchedulerConfig
from cearx.core.events import BlockSealed, ClockAdvanced, RequestArrived, StepFinished, StepPlan
from cearx.core.identifiers import BlockHash, RequestId, StepId
from cearx.core.messages import StepResult
from cearx.core.scheduler import Scheduler
from cearx.core.step_times import StepTimes, step_note
from cearx.core.trace_writer import TraceWriter

BLOCK_SIZE = 16
NUM_RUNNING = (1, 16, 64, 256, 1024)
LIMITS_US = {("unchanged", 64): 30, ("unchanged", 256): 60}
LIMITS_US |= {(load, n): us for load in ("blocks", "traffic") for n, us in ((64, 100), (256, 300))}
"""Median microseconds a step."""

RESULT = StepResult(
    step_id=StepId(0),
    rows=(),
    execute_us=7900,
    launch_us=200,
    device_us=7850,
    transfer_us=9,
    received_us=1_000,
    sent_us=9_000,
)
"""What the worker tells of a step's times."""


def made_up_hash(request_id: int, index: int) -> BlockHash:
    return BlockHash((request_id << 20 | index).to_bytes(DIGEST_SIZE, "little"))


class Load:
    """A scheduler at so many running requests, driven as the core's shell does."""

    def __init__(self, name: str, num_running: int, folder: Path) -> None:
        self.config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_running * 512,
            max_model_len=8192,
            max_num_seqs=num_running,
            max_num_batched_tokens=4096 + num_running,
            enable_prefix_caching=True,
            pipeline_depth=2,
        )
        self.is_staggered = name != "unchanged"
        self.max_tokens = 128 if name == "traffic" else 8000
        self.num_running = num_running
        self.scheduler = Scheduler(self.config)
        self.log = TraceWriter.open(folder, self.config, 1, print)
        self.lengths: dict[RequestId, int] = {}
        self.times = StepTimes()
        self.in_flight: deque[StepPlan] = deque()
        self.num_arrived = self.now_us = 0
        self.is_stuck = False
        """Nothing can be planned before a step in flight is finished."""
        self.us: list[float] = []
        """Of each step that counts."""

    def arrive(self) -> None:
        """Not timed before the step in which it is admitted: its own cost is a prompt's."""
        index = self.num_arrived
        length = 32 + (index % BLOCK_SIZE if self.is_staggered else 0)
        first = index < self.num_running
        num_outputs = self.max_tokens - (index * 97 % self.max_tokens if first else 0)
        event = RequestArrived(
            request_id=RequestId(index),
            num_prompt_tokens=length,
            max_tokens=num_outputs if self.max_tokens < 1000 else self.max_tokens,
            block_hashes=tuple(made_up_hash(index, i) for i in range(length // BLOCK_SIZE)),
            frontend_index=0,
            arrived_us=self.now_us,
            priority=0,
            has_exact_length=True,
        )
        self.num_arrived += 1
        self.lengths[event.request_id] = length
        self.log.append(event)
        assert not self.scheduler.apply(event)

    def step(self) -> None:
        """The result of the oldest step in flight, then the plan of the next."""
        is_full = len(self.in_flight) == 2 or self.is_stuck
        finished = self.result(self.in_flight.popleft()) if is_full else None
        begin_ns = time.perf_counter_ns()
        if finished is not None:
            self.log.append(finished)
            for outcome in self.scheduler.apply(finished):
                self.log.append(outcome)
                del self.lengths[outcome.request_id]
            taken_us = self.now_us + 9000
            note = step_note(
                self.times.finished(),
                RESULT,
                taken_us=taken_us,
                applied_us=taken_us + 40,
                delivered_us=None,
            )
            self.log.append(note)
        while len(self.lengths) < self.num_running:
            self.arrive()
        clock = ClockAdvanced(now_us=self.now_us)
        self.log.append(clock)
        self.scheduler.apply(clock)
        plan = self.scheduler.plan()
        self.is_stuck = plan is None
        if plan is None:
            return
        self.log.append(plan)
        self.log.flush()
        self.times.sent(plan, self.now_us, self.now_us + 40, self.now_us + 60)
        spent_us = (time.perf_counter_ns() - begin_ns) / 1000
        self.in_flight.append(plan)
        self.now_us += 8000
        is_calm = not (plan.granted or plan.chunks or (finished and finished.sealed))
        if len(plan.decodes) + len(plan.chunks) >= 0.9 * self.num_running and finished is not None:
            if self.is_staggered or is_calm:
                self.us.append(spent_us)

    def result(self, plan: StepPlan) -> StepFinished:
        sealed = []
        for request_id in (*plan.decodes, *(c.request_id for c in plan.chunks if c.samples)):
            if request_id not in self.lengths:
                continue
            length = self.lengths[request_id] = self.lengths[request_id] + 1
            if length % BLOCK_SIZE == 0:
                block_hash = made_up_hash(request_id, length // BLOCK_SIZE - 1)
                sealed.append(BlockSealed(request_id=request_id, block_hash=block_hash))
        return StepFinished(step_id=plan.step_id, stopped=(), sealed=tuple(sealed), execute_us=7900)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    print(f"{'load':<11}{'running':>8}{'median us':>11}{'mean':>8}{'p99':>8}{'limit':>8}")
    for name in ("unchanged", "blocks", "traffic"):
        for num_running in NUM_RUNNING:
            with tempfile.TemporaryDirectory() as folder:
                load = Load(name, num_running, Path(folder))
                for _ in range(arguments.steps):
                    load.step()
                load.log.close()
            us = load.us
            limit = LIMITS_US.get((name, num_running))
            verdict = "" if limit is None else f"{limit:>8}{'' if median(us) <= limit else ' OVER'}"
            p99 = quantiles(us, n=100)[98]
            print(
                f"{name:<11}{num_running:>8}{median(us):>11.1f}{mean(us):>8.1f}{p99:>8.1f}{verdict}"
            )


if __name__ == "__main__":
    main()
