"""The rules hold for every run of the scheduler, and each planted mistake breaks one of them."""

from functools import cache
from random import Random

import msgspec
import pytest
from mutants import MUTATIONS, Mutation, mutant
from random_run import CONFIGS, PIPELINED, SMALL, URGENT, RandomRun, random_config
from simulated_engine import RecordList

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    Decision,
    Event,
    FinishReason,
    PrefixCacheEmptied,
    RequestEnded,
    StepPlan,
)
from cearx.core.identifiers import BlockId, RequestId
from cearx.core.scheduler import Scheduler
from cearx.replay.failures import Watch, first_failure
from cearx.replay.invariants import violations
from cearx.replay.scripted import Script, script_of
from cearx.replay.trace import TraceRecord
from cearx.replay.violation import Violation


def run(seed: int, config: SchedulerConfig = SMALL) -> RecordList:
    log = RecordList()
    RandomRun(config, seed, log=log).run(80)
    return log


def check(values: list[Event | Decision], config: SchedulerConfig = SMALL) -> list[Violation]:
    records = (TraceRecord(10 * seq, seq, value) for seq, value in enumerate(values, 1))
    return list(violations(config, records))


@pytest.mark.parametrize("seed", range(40))
def test_every_run_keeps_the_rules(seed: int) -> None:
    """No violation in runs under any small configuration."""
    config = [SMALL, PIPELINED, URGENT][seed] if seed < 3 else random_config(Random(seed))
    assert check(run(seed, config), config) == []


def find_plan(values: RecordList, wanted: str) -> int:
    for index, value in enumerate(values):
        if isinstance(value, StepPlan) and value.step_id > 5 and getattr(value, wanted):
            return index
    raise AssertionError(f"no plan with {wanted}")


def broken(values: RecordList, index: int, **fields: object) -> Violation:
    """The first violation with other fields in one record."""
    found = check(
        [*values[:index], msgspec.structs.replace(values[index], **fields), *values[index + 1 :]]
    )
    assert found, "no violation"
    assert found[0].seq >= index + 1
    return found[0]


def test_each_rule_names_its_breach() -> None:
    """One changed field each: the rule, the record and the step are named."""
    values = run(1)
    at = find_plan(values, "granted")
    plan = values[at]
    assert isinstance(plan, StepPlan)
    grant = plan.granted[-1]

    def with_block(block: int) -> tuple[object, ...]:
        ids = (*grant.block_ids[:-1], BlockId(block))
        return (*plan.granted[:-1], msgspec.structs.replace(grant, block_ids=ids))

    first = broken(values, at, granted=with_block(SMALL.num_blocks))
    assert (first.invariant, first.seq, first.step_id) == ("I1", at + 1, plan.step_id)
    assert first.request_ids == (grant.request_id,)

    held = next(i for i, v in enumerate(values) if i > at and isinstance(v, StepPlan) and v.granted)
    later = values[held]
    assert isinstance(later, StepPlan)
    again = msgspec.structs.replace(later.granted[0], block_ids=(grant.block_ids[-1],))
    assert broken(values, held, granted=(again,)).invariant in ("I2", "I3")

    chunked = find_plan(values, "chunks")
    chunk = values[chunked].chunks[0]
    more = msgspec.structs.replace(chunk, num_tokens=chunk.num_tokens + 100)
    assert broken(values, chunked, chunks=(more,)).invariant == "I4"
    moved = msgspec.structs.replace(chunk, start=chunk.start + 1)
    rest = values[chunked].chunks[1:]
    assert broken(values, chunked, chunks=(moved, *rest)).invariant == "I6"
    assert broken(values, chunked, preempted=(RequestId(999),)).invariant == "I8"


def test_ends() -> None:
    """A wrong reason, a missing end and a second one break I7."""
    values = run(2)
    at = next(
        i
        for i, v in enumerate(values)
        if isinstance(v, RequestEnded) and v.reason is FinishReason.LENGTH
    )
    assert broken(values, at, reason=FinishReason.STOP).invariant == "I7"
    assert check([*values[:at], *values[at + 1 :]])[0].invariant == "I7"
    twice = check([*values[: at + 1], *values[at:]])
    assert (twice[0].invariant, twice[0].text) == (
        "I7",
        f"request {values[at].request_id} ends twice",
    )


def test_resets() -> None:
    """A wrong count, a missing answer and one that nothing asked for break I1."""
    values = run(3)
    at = next(i for i, v in enumerate(values) if isinstance(v, PrefixCacheEmptied))
    emptied = values[at]
    assert isinstance(emptied, PrefixCacheEmptied)
    for field in ("num_freed", "num_in_use"):
        found = broken(values, at, **{field: getattr(emptied, field) + 1})
        assert (found.invariant, found.seq) == ("I1", at + 1)
    missing = check([*values[:at], *values[at + 1 :]])
    assert missing[0].text == "a reset of the prefix cache is not answered"
    twice = check([*values[: at + 1], *values[at:]])
    assert twice[0].text == "the prefix cache is emptied for no reason"


class Greedy(Scheduler):
    """Takes as many seats as there are requests."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(msgspec.structs.replace(config, max_num_seqs=8))


def test_seats() -> None:
    """More running requests than seats break I5."""
    log = RecordList()
    try:
        RandomRun(SMALL, 1, Greedy(SMALL), log).run(80)
    except AssertionError:
        pass
    assert "I5" in {violation.invariant for violation in check(log)}


NOT_IN_THE_LOG = {
    "waits_for_too_little",
    "preempts_for_nothing",
    "recomputes_uncounted",
    "pace_forgets_decodes",
    "deadline_passes_by",
}
"""Whether a wait or a preemption was worth it, the pace that sizes chunks and a count for people
are no rules; and a deadline that is missed at the very microsecond shows in no run here."""


@pytest.mark.parametrize(
    "mutation",
    [m for m in MUTATIONS if m.breaks_invariant and m.name not in NOT_IN_THE_LOG],
    ids=lambda mutation: mutation.name,
)
def test_a_mistake_is_found(mutation: Mutation) -> None:
    """The log that a scheduler with a mistake leaves behind breaks a rule, or it fails itself."""
    make, watch = mutant(mutation), Watch()
    for seed in range(60):
        if first_failure(make, script(seed), watch) is not None:
            return
    raise AssertionError(f"{mutation.name} breaks no rule")


@cache
def script(seed: int) -> Script:
    """The inputs of a run; the same load for every mutation."""
    config = CONFIGS[seed % len(CONFIGS)]
    records = (TraceRecord(seq, seq, value) for seq, value in enumerate(run(seed, config)))
    return script_of(config, records)
