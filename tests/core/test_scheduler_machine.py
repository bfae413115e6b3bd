"""A state machine over the scheduler: any order of arrivals, steps, cancels, stops and restores.

Every rule runs under the checks of the simulated engine: conservation of blocks, budget, seats,
order of arrival, rows that continue their requests, the right KV under every row, one end each.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated_engine import VOCABULARY, SimulatedEngine

from cearx.core.config import SchedulerConfig
from cearx.core.identifiers import RequestId

TEXTS = [[(i * i + 3 * text) % VOCABULARY for i in range(48)] for text in range(3)]
RULES_IN_AN_EXAMPLE = 70
"""At least, on average over many."""


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler; the counts are over all examples."""

    num_rules = 0
    num_steps = 0
    """Steps of the scheduler that were planned."""

    @initialize(
        block_size=st.sampled_from([1, 3, 4, 16]),
        num_blocks=st.integers(1, 24),
        max_model_len=st.integers(2, 64),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.sampled_from([0, 1, 7, 60]),
        enable_prefix_caching=st.booleans(),
        pipeline_depth=st.sampled_from([2, 1, 3]),
        admission=st.sampled_from(["forecast", "watermark", "greedy"]),
        scheduling_policy=st.sampled_from(["fcfs", "priority"]),
        max_overtakes=st.sampled_from([0, 1, 4]),
        long_prefill_token_threshold=st.sampled_from([0, 1, 6]),
        max_num_partial_prefills=st.sampled_from([0, 1, 2]),
        target_itl_us=st.sampled_from([0, 8_500]),
        max_num_queued_reqs=st.sampled_from([0, 0, 1, 5]),
        max_num_queued_tokens=st.sampled_from([0, 0, 70]),
        request_timeout_us=st.sampled_from([0, 0, 400_000]),
    )
    def configure(self, max_num_seqs: int, spare_budget: int, **sizes: Any) -> None:
        self.engine = SimulatedEngine(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_seqs + spare_budget,
                **sizes,
            )
        )
        self.num_arrived = 0

    def count(self) -> None:
        SchedulerMachine.num_rules += 1

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.integers(0, 48),
        tail=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
        max_tokens=st.sampled_from([0, 1, 2, 3, 9, 30]),
        priority=st.integers(-1, 1),
        is_exact=st.booleans(),
    )
    def arrive(
        self,
        text: list[int],
        length: int,
        tail: list[int],
        max_tokens: int,
        priority: int,
        is_exact: bool,
    ) -> None:
        self.count()
        self.engine.arrive(
            text[:length] + tail, max_tokens, priority=priority, has_exact_length=is_exact
        )
        self.num_arrived += 1

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), tail=st.lists(st.integers(0, VOCABULARY - 1), max_size=3))
    def continue_a_conversation(self, data: st.DataObject, tail: list[int]) -> None:
        """A prompt that holds the outputs so far of another request."""
        self.count()
        earlier = self.engine.requests[data.draw(st.sampled_from(sorted(self.engine.requests)))]
        self.engine.arrive(earlier.token_ids + tail, 5)
        self.num_arrived += 1

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Any request: waiting, running, in flight, ended, refused or not there yet."""
        self.count()
        self.engine.cancel(RequestId(data.draw(st.integers(0, self.num_arrived + 1))))

    def plan_step(self) -> None:
        SchedulerMachine.num_steps += self.engine.try_plan() is not None

    @precondition(lambda self: self.engine.can_plan)
    @rule()
    def plan(self) -> None:
        self.count()
        self.plan_step()

    @precondition(lambda self: self.engine.in_flight)
    @rule(stops=st.integers(0, 31), fails=st.integers(0, 31), calm=st.booleans())
    def finish(self, stops: int, fails: int, calm: bool) -> None:
        """Bit i of `stops` and `fails` is the i-th sampling row's fate; calm steps have none."""
        self.count()
        rows = [] if calm else list(enumerate(self.engine.sampling_rows()))
        self.engine.finish(
            [request_id for i, request_id in rows if stops >> i & 1],
            [request_id for i, request_id in rows if fails >> i & 1],
        )

    @precondition(lambda self: self.engine.can_plan or self.engine.in_flight)
    @rule(count=st.sampled_from([2, 6, 40]))
    def go_on(self, count: int) -> None:
        """Calm steps, so that requests get far."""
        self.count()
        for _ in range(count):
            if self.engine.can_plan:
                self.plan_step()
            elif self.engine.in_flight:
                self.engine.finish()

    @rule(duration_us=st.sampled_from([0, 1, 20_000, 900_000]))
    def let_time_pass(self, duration_us: int) -> None:
        self.count()
        self.engine.advance(duration_us)

    @rule()
    def reset_cache(self) -> None:
        self.count()
        self.engine.reset_cache()

    @rule()
    def restore(self) -> None:
        """From here on a restored scheduler decides and must agree with the one it came from."""
        self.count()
        self.engine.fork()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()


def test_scheduler_machine(request: pytest.FixtureRequest) -> None:
    """20,000 rules hold every invariant, and whatever is pending ends when arrivals stop."""
    num_rules = int(request.config.getoption("--machine-steps"))
    SchedulerMachine.num_rules = SchedulerMachine.num_steps = 0
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=num_rules // RULES_IN_AN_EXAMPLE,
            stateful_step_count=100,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"{SchedulerMachine.num_rules} rules, {SchedulerMachine.num_steps} steps planned")
    assert SchedulerMachine.num_rules >= num_rules
    assert SchedulerMachine.num_steps >= num_rules // 20
