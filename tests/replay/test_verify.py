"""Verification: a run repeats, and the first decision that differs is described."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
from random_run import SMALL, RandomRun, random_config
from simulated_engine import RecordList
from trace_samples import write_run

from cearx.core import admission
from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    ClockAdvanced,
    Decision,
    Event,
    FinishReason,
    RequestEnded,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import BlockHash, RequestId, StepId
from cearx.core.scheduler import Scheduler
from cearx.core.trace_format import TraceIncompatible
from cearx.replay import cli
from cearx.replay.summary import Summary
from cearx.replay.trace import TraceRecord
from cearx.replay.verify import Difference, Verifier, describe, fresh_scheduler

GOLDEN = Path(__file__).with_name("golden_decisions.txt")


def run(seed: int, num_steps: int, config: SchedulerConfig = SMALL) -> RecordList:
    log = RecordList()
    RandomRun(config, seed, log=log).run(num_steps)
    return log


def numbered(values: list[Event | Decision]) -> list[TraceRecord]:
    return [TraceRecord(100 * seq, seq, value) for seq, value in enumerate(values, 1)]


def verify(
    values: list[Event | Decision], config: SchedulerConfig = SMALL, ended: bool = True
) -> Difference | None:
    verifier = Verifier(Scheduler(config))
    for record in numbered(values):
        difference = verifier.feed(record)
        if difference is not None:
            return difference
    return verifier.finish(ended)


@pytest.mark.parametrize("seed", range(10))
def test_any_run_repeats(seed: int) -> None:
    """No difference for a whole run nor for any beginning of it without an end."""
    config = random_config(Random(seed))
    values = run(seed, 40, config)
    assert verify(values, config) is None
    for length in range(0, len(values), 7):
        assert verify(values[:length], config, ended=False) is None


def changed(values: RecordList, step: int, **fields: object) -> tuple[RecordList, int]:
    """The run with other fields in one plan, and that plan's number."""
    for index, value in enumerate(values):
        if isinstance(value, StepPlan) and value.step_id == step:
            values[index] = msgspec.structs.replace(value, **fields)
            return values, index + 1
    raise AssertionError(f"no step {step}")


def plan_with(values: RecordList, wanted: Callable[[StepPlan], object]) -> StepPlan:
    return next(v for v in values if isinstance(v, StepPlan) and v.step_id > 5 and wanted(v))


def test_the_field_is_named() -> None:
    """Path, both values, step, number, offset, the requests and the inputs before."""
    values = run(1, 60)
    plan = plan_with(values, lambda p: len(p.decodes) > 2)
    values, seq = changed(values, plan.step_id, decodes=plan.decodes[:-1])
    difference = verify(values)
    assert difference is not None
    last = plan.decodes[-1]
    assert difference.field == f"StepPlan.decodes[{len(plan.decodes) - 1}:]"
    assert (difference.logged, difference.computed) == ("[]", f"[{last}]")
    assert (difference.step_id, difference.seq, difference.offset) == (plan.step_id, seq, 100 * seq)
    assert difference.request_ids == (last,)
    assert len(difference.inputs) == 20
    assert difference.inputs[-1] == f"{seq - 1} ClockAdvanced(now_us={8000 * (plan.step_id + 1)})"


def test_a_field_within_a_list_is_named() -> None:
    """The path leads to the one number that differs."""
    values = run(1, 60)
    plan = plan_with(values, lambda p: len(p.chunks) > 1)
    wrong = msgspec.structs.replace(plan.chunks[1], num_tokens=plan.chunks[1].num_tokens + 1)
    values, _ = changed(values, plan.step_id, chunks=(plan.chunks[0], wrong, *plan.chunks[2:]))
    difference = verify(values)
    assert difference is not None
    assert difference.field == "StepPlan.chunks[1].num_tokens"
    assert int(difference.logged) == int(difference.computed) + 1
    assert difference.request_ids == (wrong.request_id,)


def test_missing_and_surplus_outcomes() -> None:
    """An end that only one side has is shown against nothing."""
    values = run(2, 60)
    ends = [isinstance(value, RequestEnded) for value in values]
    at = next(i for i in range(50, len(ends)) if ends[i - 1 : i + 2] == [False, True, False])
    gone = values[at]
    difference = verify(values[:at] + values[at + 1 :])
    assert difference is not None
    assert (difference.field, difference.logged) == ("RequestEnded", "nothing")
    assert difference.computed == describe(gone)
    assert difference.request_ids == (gone.request_id,)
    difference = verify([*values[:at], gone, *values[at:]])
    assert difference is not None
    assert (difference.field, difference.computed) == ("RequestEnded", "nothing")


def test_another_reason_is_a_difference() -> None:
    """Not only who ends but why."""
    values = run(2, 60)
    at = next(
        i
        for i, v in enumerate(values)
        if isinstance(v, RequestEnded) and v.reason is FinishReason.LENGTH
    )
    values[at] = msgspec.structs.replace(values[at], reason=FinishReason.STOP)
    difference = verify(values)
    assert difference is not None
    assert difference.field == "RequestEnded.reason"
    assert (difference.logged, difference.computed) == ("STOP", "LENGTH")


def test_a_last_outcome_may_be_missing_without_an_end() -> None:
    """A killed writer had logged the input; a writer that closed had also logged the outcome."""
    values = run(2, 30)
    at = max(i for i, v in enumerate(values) if isinstance(v, RequestEnded))
    assert verify(values[:at], ended=False) is None
    difference = verify(values[:at], ended=True)
    assert difference is not None and difference.logged == "nothing"


def test_a_scheduler_that_fails_is_a_difference() -> None:
    """The input that made it fail is named with the failed check."""
    values = run(3, 20)
    late = StepFinished(step_id=StepId(7), stopped=(), sealed=(), execute_us=1)
    difference = verify([*values, late])
    assert difference is not None
    assert difference.field == "StepFinished"
    assert difference.computed.startswith("AssertionError: step 7 finished")
    assert difference.seq == len(values) + 1


class Stuck(Scheduler):
    """A scheduler with a fault that shows in `plan`."""

    def plan(self) -> StepPlan:
        raise AssertionError("work is pending and nothing can run")


def test_a_scheduler_that_fails_in_plan_is_found_behind_the_last_tick() -> None:
    """The log ends with the tick, because the plan never came."""
    values = run(3, 20)
    first_plan = next(i for i, v in enumerate(values) if isinstance(v, StepPlan))
    verifier = Verifier(Stuck(SMALL))
    for record in numbered(values[:first_plan]):
        assert verifier.feed(record) is None
    difference = verifier.finish(ended=True)
    assert difference is not None
    assert difference.field == "ClockAdvanced"
    assert difference.computed == "AssertionError: work is pending and nothing can run"


def test_an_absurd_pool_is_refused() -> None:
    """A header of a few bytes cannot ask for more memory than there is."""
    config = msgspec.structs.replace(SMALL, num_blocks=2**40)
    with pytest.raises(TraceIncompatible, match=f"{2**40} blocks, the limit is 1048576"):
        fresh_scheduler(config)


def test_describe_stays_short() -> None:
    """Long tuples and hashes are cut, the counts stay."""
    assert describe(tuple(range(100))) == "[0, 1, 2, 3, … 100 in all]"
    assert describe(BlockHash(bytes(range(16)))) == "00010203…"
    assert describe(RequestEnded(request_id=RequestId(3), reason=FinishReason.STOP)) == (
        "RequestEnded(request_id=3, reason=STOP)"
    )


@pytest.mark.parametrize("seed", range(5))
def test_summary(seed: int) -> None:
    """The figures are those that the simulation counted for itself."""
    values = RecordList()
    run = RandomRun(SMALL, seed, log=values)
    engine = run.run(80)
    summary = Summary()
    for record in numbered(values):
        summary.feed(record)
    assert summary.num_requests == run.num_arrived
    assert summary.num_steps == engine.checker.num_steps
    assert summary.num_preemptions == engine.num_preemptions
    assert summary.num_output_tokens == engine.num_output_tokens
    assert summary.ended == {
        reason: list(engine.ended.values()).count(reason) for reason in set(engine.ended.values())
    }
    assert summary.refused.total() == run.num_arrived - len(engine.ended)
    assert summary.num_live == 0
    assert 0 < summary.num_hit_tokens <= engine.num_hit_tokens
    ticks = [value.now_us for value in values if isinstance(value, ClockAdvanced)]
    assert summary.duration_us == ticks[-1] - ticks[0]


def test_decisions_are_as_agreed(update_golden: bool) -> None:
    """A change of what the scheduler decides shows as a change of this text, for review."""
    lines = [f"{type(v).__name__} {msgspec.json.encode(v).decode()}\n" for v in run(7, 40)]
    text = "".join(lines)
    if update_golden:
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "if it is meant: pytest --update-golden, then review"


def test_an_admission_policy_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace may name one that is installed; it is loaded for who asks for it, and only then."""
    loaded: list[str] = []

    class Installed:
        name = "hopeful"

        def load(self) -> object:
            loaded.append(self.name)
            return admission.POLICIES[SMALL.admission]

    monkeypatch.setattr(admission, "entry_points", lambda group: [Installed()])
    monkeypatch.setattr(admission, "_loaded", {"hopeful": admission.POLICIES[SMALL.admission]})
    path = write_run(tmp_path, 30, config=msgspec.structs.replace(SMALL, admission="hopeful"))
    admission._loaded.clear()
    assert cli.main([str(path)]) == 3
    assert "'hopeful'; an installed policy has to be asked for" in capsys.readouterr().out
    assert cli.main(["stats", str(path)]) == 0
    assert not loaded
    assert cli.main(["--policy", "hopeful", str(path)]) == 0
    assert loaded == ["hopeful"]
    assert cli.main(["--policy", "hopeles", str(path)]) == 2
