"""A burst of equal requests on a simulated device: step times from bytes and arithmetic.

A step streams the weights and every row's KV once and computes its tokens; its time is the longer
of the two, plus a constant. Figures of an 8B model (36 layers, 8 KV heads of 128, bfloat16) on a
card of 32 GB. Used by the tests that compare admission policies.
"""

from collections import deque
from dataclasses import dataclass

from cearx.core.config import SchedulerConfig
from cearx.core.events import ClockAdvanced, RequestArrived, StepFinished, StepPlan
from cearx.core.identifiers import RequestId
from cearx.core.scheduler import Scheduler

WEIGHT_BYTES = 15_137_000_000
KV_BYTES_PER_TOKEN = 147_456
BYTES_PER_S = 1_600e9
FLOP_PER_TOKEN = 2 * 7_570_000_000
FLOP_PER_S = 160e12
STEP_OVERHEAD_US = 350
KV_POOL_BYTES = 11_400_000_000
"""What 90 % of 32 GB leaves beside 16.4 GB of weights and 1 GB for everything else."""


@dataclass(frozen=True)
class Burst:
    """What a burst brought."""

    tokens_per_s: float
    num_preemptions: int
    num_recomputed_tokens: int
    num_steps: int
    max_running: int


def pool_blocks(block_size: int) -> int:
    return KV_POOL_BYTES // (KV_BYTES_PER_TOKEN * block_size)


class Device:
    """Knows how long each request's context is, from plans alone."""

    def __init__(self) -> None:
        self._lengths: dict[RequestId, int] = {}

    def step_us(self, plan: StepPlan) -> int:
        kv_tokens = tokens = 0
        for chunk in plan.chunks:
            self._lengths[chunk.request_id] = chunk.start + chunk.num_tokens
            kv_tokens += chunk.start + chunk.num_tokens
            tokens += chunk.num_tokens
        for request_id in plan.decodes:
            self._lengths[request_id] += 1
            kv_tokens += self._lengths[request_id]
        tokens += len(plan.decodes)
        moved = (WEIGHT_BYTES + kv_tokens * KV_BYTES_PER_TOKEN) / BYTES_PER_S
        return int(1e6 * max(moved, tokens * FLOP_PER_TOKEN / FLOP_PER_S)) + STEP_OVERHEAD_US


def run_burst(
    admission: str,
    *,
    concurrency: int,
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_requests: int | None = None,
    block_size: int = 256,
    num_blocks: int | None = None,
    has_exact_length: bool = True,
) -> Burst:
    """`concurrency` clients, each with one request at a time, until all have their answers."""
    config = SchedulerConfig(
        block_size=block_size,
        num_blocks=num_blocks or pool_blocks(block_size),
        max_model_len=40_960,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        pipeline_depth=2,
        admission=admission,
    )
    scheduler, device = Scheduler(config), Device()
    in_flight: deque[StepPlan] = deque()
    total = num_requests or concurrency
    now_us = num_arrived = num_ended = max_running = num_steps = 0

    def arrive() -> None:
        nonlocal num_arrived
        arrival = RequestArrived(
            request_id=RequestId(num_arrived),
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=num_output_tokens,
            block_hashes=(),
            frontend_index=0,
            arrived_us=now_us,
            priority=0,
            has_exact_length=has_exact_length,
        )
        assert not scheduler.apply(arrival), "refused"
        num_arrived += 1

    while num_ended < total:
        while num_arrived < min(total, num_ended + concurrency):
            arrive()
        scheduler.apply(ClockAdvanced(now_us=now_us))
        while scheduler.has_work() and (plan := scheduler.plan()) is not None:
            in_flight.append(plan)
            num_steps += 1
            max_running = max(max_running, len(scheduler.books.running))
        plan = in_flight.popleft()
        step_us = device.step_us(plan)
        now_us += step_us
        finished = StepFinished(step_id=plan.step_id, stopped=(), sealed=(), execute_us=step_us)
        num_ended += len(scheduler.apply(finished))
    return Burst(
        tokens_per_s=total * num_output_tokens / now_us * 1e6,
        num_preemptions=scheduler.books.totals.num_preemptions,
        num_recomputed_tokens=scheduler.books.totals.num_recomputed_tokens,
        num_steps=num_steps,
        max_running=max_running,
    )
