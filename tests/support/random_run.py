"""Runs of a simulated engine that are a function of (config, seed): the load for traces and tests.

Arrivals come in bursts; prompts begin with one of a few common texts or go on from an earlier
request; some requests stop, fail, or are cancelled while they wait, run, or after they ended.
Results come late, the clock jumps, the cache is reset.
"""

from random import Random

import msgspec
from simulated_engine import VOCABULARY, Log, SimulatedEngine

from cearx.core.config import SchedulerConfig
from cearx.core.identifiers import RequestId
from cearx.core.scheduler import Scheduler

SMALL = SchedulerConfig(
    block_size=4,
    num_blocks=24,
    max_model_len=64,
    max_num_seqs=5,
    max_num_batched_tokens=16,
    enable_prefix_caching=True,
    admission="greedy",
)
"""So tight that every reason to wait, preemption and eviction occur within some dozen steps."""
PIPELINED = msgspec.structs.replace(
    SMALL,
    pipeline_depth=2,
    admission="forecast",
    max_num_partial_prefills=2,
    long_prefill_token_threshold=9,
)
"""What a server does, with caps on prefills."""
URGENT = msgspec.structs.replace(
    PIPELINED, scheduling_policy="priority", admission="greedy", max_overtakes=1, num_blocks=20
)
"""Priorities, and no policy but whether a prompt fits."""
DEEP = msgspec.structs.replace(
    PIPELINED, pipeline_depth=3, admission="greedy", num_blocks=16, max_overtakes=0
)
"""Three steps in flight and hardly any blocks."""


LIMITED = msgspec.structs.replace(
    PIPELINED,
    target_itl_us=9_000,
    max_num_queued_reqs=4,
    request_timeout_us=700_000,
    max_overtakes=1,
)
"""Every limit there is."""
CONFIGS = (PIPELINED, SMALL, URGENT, LIMITED, DEEP)


def random_config(random: Random) -> SchedulerConfig:
    """Any small configuration, down to one block, one seat and one token a step."""
    max_num_seqs = random.randint(1, 8)
    often_none = [0, 0, 0]
    return SchedulerConfig(
        block_size=random.choice([1, 2, 3, 4, 7, 16]),
        num_blocks=random.randint(1, 40),
        max_model_len=random.randint(2, 96),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + random.choice([0, 1, 3, 16, 64]),
        enable_prefix_caching=random.random() < 0.8,
        pipeline_depth=random.choice([1, 2, 2, 3]),
        admission=random.choice(["forecast", "forecast", "watermark", "greedy"]),
        scheduling_policy=random.choice(["fcfs", "fcfs", "priority"]),
        max_overtakes=random.choice([0, 1, 4]),
        long_prefill_token_threshold=random.choice([*often_none, 1, 5, 20]),
        max_num_partial_prefills=random.choice([*often_none, 1, 2]),
        target_itl_us=random.choice([*often_none, 9_000, 12_000]),
        max_num_queued_reqs=random.choice([*often_none, 1, 6]),
        max_num_queued_tokens=random.choice([*often_none, 30, 90]),
        request_timeout_us=random.choice([*often_none, 200_000, 700_000]),
    )


class RandomRun:
    """One run; `step` is one step with whatever happens around it."""

    def __init__(
        self,
        config: SchedulerConfig,
        seed: int,
        scheduler: Scheduler | None = None,
        log: Log | None = None,
    ) -> None:
        self.engine = SimulatedEngine(config, scheduler, log)
        self.random = Random(seed)
        self._texts = [self._tokens(self.random.randint(4, 40)) for _ in range(3)]
        self.num_arrived = 0

    def run(self, num_steps: int) -> SimulatedEngine:
        """So many steps, then no arrivals until everyone has ended."""
        while self.engine.checker.num_steps < num_steps:
            self.step()
        self.engine.drain()
        return self.engine

    def step(self) -> None:
        self._events()
        while not self.engine.requests:
            self._arrive()
        engine = self.engine
        while not engine.can_plan:
            self._finish()
            while not engine.requests:
                self._arrive()
        engine.try_plan()
        self._events()
        is_late = self.random.random() < 0.8
        if engine.in_flight and not (is_late and engine.can_plan):
            self._finish()

    def _finish(self) -> None:
        engine, random = self.engine, self.random
        if not engine.in_flight:
            return
        rows = engine.sampling_rows()
        stopped = [i for i in rows if random.random() < 0.03]
        failed = [i for i in rows if random.random() < 0.01]
        plan = engine.in_flight[0].plan
        num_tokens = len(plan.decodes) + sum(chunk.num_tokens for chunk in plan.chunks)
        engine.finish(stopped, failed, 6_000 + 90 * num_tokens + random.randint(0, 900))

    def _events(self) -> None:
        waiting = len(self.engine.scheduler.books.waiting)
        if self.random.random() < (0.25 if waiting < 4 else 0.02):
            for _ in range(self.random.randint(1, 4)):
                self._arrive()
        if self.num_arrived and self.random.random() < 0.06:
            recent = self.random.randint(max(0, self.num_arrived - 12), self.num_arrived)
            self.engine.cancel(RequestId(recent))
        if self.random.random() < 0.01:
            self.engine.advance(self.random.choice([0, 1, 100_000, 1_500_000]))
        if self.random.random() < 0.005:
            self.engine.reset_cache()

    def _arrive(self) -> None:
        random = self.random
        prompt = list(random.choice(self._texts))[: random.randint(0, 40)]
        prompt += self._tokens(random.randint(0, 8))
        live = list(self.engine.requests.values())
        if live and random.random() < 0.2:
            prompt = random.choice(live).token_ids + self._tokens(random.randint(0, 3))
        self.engine.arrive(
            prompt,
            random.choice([0, 1, 2, 5, 16, 30, 45]),
            priority=random.choice([0, 0, 1, 2, -1]),
            has_exact_length=random.random() < 0.3,
        )
        self.num_arrived += 1

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]
