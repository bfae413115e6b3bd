"""Shrinking: planted mistakes in big traces come down to a few requests that show the same."""

import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from random import Random

import msgspec
import pytest
from mutants import MUTATIONS, Mutation, mutant
from random_run import CONFIGS, RandomRun
from simulated_engine import RecordList
from trace_samples import write_run

from cearx.core.config import SchedulerConfig
from cearx.core.scheduler import Scheduler
from cearx.replay import cli, scripted
from cearx.replay.failures import Failure, Watch, first_failure, keeps
from cearx.replay.invariants import violations
from cearx.replay.other_tree import OtherTree
from cearx.replay.scripted import Arrive, Script, decode_script, encode_script, script_of
from cearx.replay.shrink import NotReproduced, Shrunk, renumbered, shrink
from cearx.replay.shrink_command import Request, run_shrink
from cearx.replay.simulation import Simulation
from cearx.replay.step_time import StepTime
from cearx.replay.trace import Trace, TraceRecord
from cearx.replay.workload import WorkloadLine, arrivals_of

BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}
ROOT = Path(__file__).parent.parent.parent
CONFIG = SchedulerConfig(
    block_size=16,
    num_blocks=600,
    max_model_len=1024,
    max_num_seqs=32,
    max_num_batched_tokens=512,
    enable_prefix_caching=True,
    admission="greedy",
)


@cache
def small_script(seed: int) -> Script:
    config = CONFIGS[seed % len(CONFIGS)]
    log = RecordList()
    RandomRun(config, seed, log=log).run(100)
    return script_of(config, (TraceRecord(seq, seq, value) for seq, value in enumerate(log)))


def failing(make: type[Scheduler], watch: Watch) -> tuple[Script, Failure]:
    for seed in range(60):
        script = small_script(seed)
        failure = first_failure(make, script, watch)
        if failure is not None:
            return script, failure
    raise AssertionError("no failure in 60 runs")


def check_minimal(make: type[Scheduler], watch: Watch, failure: Failure, shrunk: Shrunk) -> None:
    """It still fails in the same way, and no single item can go."""
    predicate = keeps(make, watch, failure)
    assert shrunk.finished
    assert predicate(shrunk.script) == len(shrunk.script.items)
    for index in range(len(shrunk.script.items)):
        items = shrunk.script.items[:index] + shrunk.script.items[index + 1 :]
        assert predicate(Script(shrunk.script.config, items)) is None, index


NOT_IN_THE_LOG = {
    "waits_for_too_little",
    "preempts_for_nothing",
    "recomputes_uncounted",
    "pace_forgets_decodes",
    "deadline_passes_by",
}
"""As in the tests of the rules."""
SHOWN = [m for m in MUTATIONS if m.breaks_invariant and m.name not in NOT_IN_THE_LOG]


@pytest.mark.parametrize("mutation", SHOWN, ids=lambda mutation: mutation.name)
def test_a_broken_rule_or_crash_is_shrunk(mutation: Mutation) -> None:
    """Each planted mistake: the same failure with fewer than ten requests."""
    make, watch = mutant(mutation), Watch()
    script, failure = failing(make, watch)
    shrunk = shrink(script, keeps(make, watch, failure), 30)
    check_minimal(make, watch, failure, shrunk)
    assert shrunk.script.num_requests < 10
    assert first_failure(Scheduler, shrunk.script, watch) is None


@pytest.mark.parametrize("name", ["evicts_the_newest", "never_shares_outputs"])
def test_a_divergence_is_shrunk(name: str) -> None:
    """Another policy: two schedulers disagree about the same field to the end."""
    make = mutant(BY_NAME[name])
    watch = Watch(kinds=frozenset({"divergence"}), other=Scheduler)
    script, failure = failing(make, watch)
    shrunk = shrink(script, keeps(make, watch, failure), 30)
    check_minimal(make, watch, failure, shrunk)
    assert shrunk.script.num_requests < 10


DEAF = Mutation(
    "deaf",
    "admitting",
    "if len(self._books.running) == self._config.max_num_seqs:",
    "if self._books.running:",
)
"""Lets in nobody while one runs: later ones starve behind long ones."""


def test_a_stall_is_shrunk() -> None:
    """Few requests are enough to show that one waits for others' whole lives."""
    watch = Watch(kinds=frozenset({"stall"}), stall_steps=24)
    deaf = mutant(DEAF)
    script, failure = failing(deaf, watch)
    shrunk = shrink(script, keeps(deaf, watch, failure), 30, keep_config=True)
    assert shrunk.script.num_requests <= 5 < script.num_requests
    assert shrunk.script.config == script.config
    assert first_failure(Scheduler, shrunk.script, watch) is None


def big_script() -> Script:
    """10,000 requests at an easy pace, then 300 at once."""
    random, at_us = Random(1), 0
    lines: list[WorkloadLine] = []
    for _ in range(9_700):
        at_us += int(random.expovariate(1 / 20_000))
        output = random.choice([1, 4, 8, 16])
        lines.append(WorkloadLine(prompt=random.randint(1, 400), output=output, at_us=at_us))
    for index in range(300):
        lines.append(WorkloadLine(prompt=200, output=90, at_us=at_us + index))
    log: list[object] = []
    arrivals = arrivals_of(lines, CONFIG, None)
    Simulation(Scheduler(CONFIG), arrivals, StepTime(fixed=5000, decode=20), log).run()
    return script_of(CONFIG, (TraceRecord(seq, seq, value) for seq, value in enumerate(log)))


def test_ten_thousand_requests() -> None:
    """A mistake that only a rush near the end shows: under ten requests within two minutes."""
    script = big_script()
    assert script.num_requests == 10_000
    make, watch = mutant(BY_NAME["one_seat_too_many"]), Watch()
    failure = first_failure(make, script, watch)
    assert failure is not None and failure.num_items > 0.9 * len(script.items)
    start = time.monotonic()
    shrunk = shrink(script, keeps(make, watch, failure), 120)
    assert time.monotonic() - start < 120
    assert shrunk.finished
    assert shrunk.script.num_requests < 10


def test_numbers_come_down() -> None:
    """A failure that needs nothing but a decode ends with the smallest sizes there are."""
    script = small_script(1)
    shrunk = shrink(script, lambda s: _position_of_decode(s), 30)
    assert shrunk.script.num_requests == 1
    request = next(i.request for i in shrunk.script.items if isinstance(i, Arrive))
    assert (request.num_prompt_tokens, request.num_outputs, request.max_tokens) == (1, 2, 2)
    assert (shrunk.script.config.num_blocks, shrunk.script.config.max_num_seqs) == (1, 1)


def _position_of_decode(script: Script) -> int | None:
    log = scripted.RecordList()
    run = scripted.ScriptRun(Scheduler(script.config), log)
    for position, item in enumerate(script.items, 1):
        run.take(item)
        if any(getattr(record, "decodes", ()) for record in log):
            return position
    return None


def test_what_does_not_fail_is_not_shrunk() -> None:
    """No failure, no result."""
    watch = Watch()
    failure = Failure(kind="crash", label="x", text="x", num_items=1)
    with pytest.raises(NotReproduced):
        shrink(small_script(1), keeps(Scheduler, watch, failure), 1)


def test_time_is_kept() -> None:
    """When the time is over the smallest so far is the answer."""
    make, watch = mutant(BY_NAME["one_seat_too_many"]), Watch()
    script, failure = failing(make, watch)
    shrunk = shrink(script, keeps(make, watch, failure), 0.02)
    assert not shrunk.finished
    assert len(shrunk.script.items) <= len(script.items)


def test_scripts_are_text() -> None:
    """JSON and back, whatever is in a script."""
    script = small_script(5)
    assert decode_script(encode_script(script)) == script
    again = renumbered(script)
    assert again.num_requests == script.num_requests
    assert first_failure(Scheduler, again, Watch()) is None


def test_the_command_writes_a_trace_and_a_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace shows the broken rule, the test passes with the scheduler and names the rule."""
    trace = Trace.open(write_run(tmp_path / "big", 300, seed=1))
    request = Request(
        keep="any", other=None, stall_steps=100, seconds=30, folder=tmp_path / "small"
    )
    run_shrink(trace, request, mutant(BY_NAME["last_in_first_out"]))
    text = capsys.readouterr().out
    assert "found invariant I11" in text
    small = Trace.open(tmp_path / "small")
    assert [v.invariant for v in violations(small.header.config, small.records())] == ["I11"]
    assert small.num_bytes < 4096
    test = tmp_path / "small" / "test_invariant_i11.py"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert "1 passed" in result.stdout


def test_a_good_scheduler_has_nothing_to_shrink(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 1 with a sentence; and options that do not fit are refused."""
    path = str(write_run(tmp_path / "big", 60, seed=1))
    assert cli.main(["shrink", path, "--out", str(tmp_path / "out")]) == 1
    assert "takes the inputs of the log without a failure" in capsys.readouterr().out
    assert cli.main(["shrink", path, "--keep", "divergence"]) == 2
    assert not (tmp_path / "out").exists()


def test_another_checkout_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkout with another policy: the divergence from it is found and shrunk."""
    mutation = BY_NAME["evicts_the_newest"]
    other = tmp_path / "other"
    for folder in ("core", "replay"):
        target = other / ".typing" / "cearx" / folder
        target.mkdir(parents=True)
        for source in (ROOT / folder).glob("*.py"):
            text = source.read_text()
            if source.stem == mutation.module:
                text = text.replace(mutation.text, mutation.replacement)
            (target / source.name).write_text(text)
    script = small_script(2)
    with OtherTree(other) as tree:
        watch = Watch(kinds=frozenset({"divergence"}), other=tree.make)  # type: ignore[arg-type]
        failure = first_failure(Scheduler, script, watch)
        assert failure is not None and failure.label == "StepPlan.granted.block_ids"
    with OtherTree(ROOT) as tree:
        watch = msgspec.structs.replace(watch, other=tree.make)
        assert first_failure(Scheduler, script, watch) is None
    path = str(write_run(tmp_path / "big", 150, seed=2))
    arguments = ["--keep", "divergence", "--other", str(other), "--out", str(tmp_path / "out")]
    assert cli.main(["shrink", path, *arguments]) == 0
    assert "found divergence StepPlan.granted.block_ids" in capsys.readouterr().out
    arguments[3] = str(tmp_path)
    assert cli.main(["shrink", path, *arguments]) == 1
    assert "is no checkout with a scheduler service" in capsys.readouterr().out
