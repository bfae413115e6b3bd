"""Some forty planted mistakes: replay finds each, and the checks those that break a rule."""

from functools import cache

import pytest
from mutants import MUTATIONS, Mutation, mutant
from random_run import CONFIGS, RandomRun
from simulated_engine import RecordList

from cearx.core.config import SchedulerConfig
from cearx.core.events import Decision, Event, Outcome, StepPlan
from cearx.core.scheduler import Scheduler
from cearx.replay.trace import TraceRecord
from cearx.replay.verify import Difference, Verifier

NUM_SEEDS = 75
NUM_STEPS = 120


def config_of(seed: int) -> SchedulerConfig:
    return CONFIGS[seed % len(CONFIGS)]


@cache
def good_run(seed: int) -> RecordList:
    """What the scheduler does; the same load for every mutation."""
    log = RecordList()
    RandomRun(config_of(seed), seed, log=log).run(NUM_STEPS)
    return log


def replay(records: list[Event | Decision], scheduler: Scheduler) -> Difference | None:
    verifier = Verifier(scheduler)
    for seq, value in enumerate(records, 1):
        difference = verifier.feed(TraceRecord(seq, seq, value))
        if difference is not None:
            return difference
    return verifier.finish(ended=True)


def first_bad_step(records: list[Event | Decision], scheduler: Scheduler) -> int | None:
    """The step of the first decision that is not as logged, found the plain way: one list."""
    step, computed, logged = None, [], []
    for value in records:
        try:
            if isinstance(value, StepPlan):
                step = value.step_id
                logged.append(value)
                plan = scheduler.plan()
                computed += [] if plan is None else [plan]
            elif isinstance(value, Outcome):
                logged.append(value)
            else:
                if logged != computed:
                    return step
                computed += scheduler.apply(value)
        except Exception:
            return step
        if logged != computed[: len(logged)]:
            return step
    raise AssertionError("no difference")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_replay_names_the_first_bad_step(mutation: Mutation) -> None:
    """A good trace diverges under the mistake, at the step where it first matters."""
    scheduler = mutant(mutation)
    for seed in range(NUM_SEEDS):
        records = good_run(seed)
        difference = replay(records, scheduler(config_of(seed)))
        if difference is not None:
            assert difference.step_id == first_bad_step(records, scheduler(config_of(seed)))
            assert difference.logged != difference.computed
            assert difference.inputs
            return
    raise AssertionError(f"{mutation.name} is not found in {NUM_SEEDS} runs")


@pytest.mark.parametrize(
    "mutation", [m for m in MUTATIONS if m.breaks_invariant], ids=lambda mutation: mutation.name
)
def test_the_checks_find_it(mutation: Mutation) -> None:
    """Without any trace: a run under the mistake fails a check, or the scheduler's own assert."""
    scheduler = mutant(mutation)
    for seed in range(NUM_SEEDS):
        try:
            RandomRun(config_of(seed), seed, scheduler(config_of(seed))).run(NUM_STEPS)
        except (AssertionError, KeyError):
            return
    raise AssertionError(f"{mutation.name} breaks no rule in {NUM_SEEDS} runs")


def test_no_mistake_no_finding() -> None:
    """The same copies without a mistake replay and pass, so the findings are of the mistakes."""
    unchanged = Mutation("nothing", "scheduler", "def plan(self)", "def plan(self)")
    scheduler = mutant(unchanged)
    for seed in range(NUM_SEEDS):
        assert replay(good_run(seed), scheduler(config_of(seed))) is None
        RandomRun(config_of(seed), seed, scheduler(config_of(seed))).run(NUM_STEPS)
