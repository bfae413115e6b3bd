"""What-if: it repeats what was, predicts what would be, and refuses where it cannot know."""

import json
from pathlib import Path
from random import Random

import msgspec
import pytest
from trace_samples import BOOT_ID, never, write_run

from cearx.core.events import CancelReason, ClockAdvanced
from cearx.core.scheduler import Scheduler
from cearx.core.trace_records import StepNote
from cearx.core.trace_writer import TraceWriter
from cearx.replay import cli, simulate
from cearx.replay.oracle import Cancellation
from cearx.replay.overrides import with_overrides
from cearx.replay.simulation import Arrival, Simulation
from cearx.replay.step_time import StepTime
from cearx.replay.trace import Trace
from cearx.replay.verify import fresh_scheduler
from cearx.replay.what_if import WhatIf, figures_of, load_of, what_if
from cearx.replay.workload import WorkloadLine, arrivals_of, uniform

LOAD = ("--num-requests", "150", "--output-len", "60", "--set", "num_blocks=700")


def run(folder: Path, *arguments: str) -> Trace:
    assert simulate.main([*LOAD, *arguments, "--trace", str(folder)]) == 0
    return Trace.open(folder)


def asked(trace: Trace, arrivals: str, *settings: str) -> WhatIf:
    changed = with_overrides(trace.header.config, settings)
    return what_if(trace, changed, arrivals, 10.0)


@pytest.mark.parametrize(
    ("arrivals", "flags"),
    [("open", ("--rate", "40")), ("closed", ("--concurrency", "40"))],
)
@pytest.mark.parametrize(
    "setting", ["max_num_batched_tokens=256", "max_num_seqs=10", "num_blocks=400"]
)
def test_it_predicts_the_other_run(
    arrivals: str, flags: tuple[str, ...], setting: str, tmp_path: Path
) -> None:
    """Against the run that really had the other configuration: each figure within 5 %."""
    before = run(tmp_path / "before", *flags)
    after = run(tmp_path / "after", *flags, "--set", setting)
    answer = asked(before, arrivals, setting)
    assert answer.error_percent < 1
    predicted = answer.changed
    assert predicted is not None
    real = figures_of(load_of(after)[0])
    assert predicted.num_output_tokens == real.num_output_tokens
    for name in ("output_tokens_per_s", "duration_us", "num_steps"):
        assert getattr(predicted, name) == pytest.approx(getattr(real, name), rel=0.05), name
    for name in ("ttft_us", "itl_us"):
        for field in ("mean", "p50"):
            left, right = (getattr(getattr(f, name), field) for f in (predicted, real))
            assert left == pytest.approx(right, rel=0.05), (name, field)


@pytest.mark.parametrize(
    "setting",
    [
        "pipeline_depth=1",
        "admission=watermark",
        "admission=greedy",
        "max_overtakes=0",
        "long_prefill_token_threshold=64",
        "max_num_partial_prefills=1",
        "target_itl_us=9000",
        "max_num_queued_reqs=3",
        "request_timeout_us=2000000",
    ],
)
def test_the_policies_can_be_asked(setting: str, tmp_path: Path) -> None:
    """Where KV is short: the run that really had the other policy, within 5 %."""
    flags = ("--concurrency", "40", "--set", "num_blocks=300")
    before = run(tmp_path / "before", *flags)
    after = run(tmp_path / "after", *flags, "--set", setting)
    assert cli.main(["check", str(tmp_path / "after")]) == 0
    predicted, real = asked(before, "closed", setting).changed, figures_of(load_of(after)[0])
    assert predicted is not None
    assert predicted.ended.keys() == real.ended.keys()
    for name in ("output_tokens_per_s", "duration_us", "num_steps"):
        assert getattr(predicted, name) == pytest.approx(getattr(real, name), rel=0.05), name


def noisy_world(seed: int) -> StepTime:
    """A machine with jitter, a bad spell, outliers and time lost between steps."""
    random = Random(seed)
    factors = [random.lognormvariate(0, 0.1) for _ in range(700)]
    factors = [f * 6 if i % 41 == 7 else f for i, f in enumerate(factors)]
    spell = random.randint(0, 600)
    factors[spell : spell + 80] = [1.5 * f for f in factors[spell : spell + 80]]
    return StepTime(
        fixed=6000,
        prefill=1200,
        decode=20,
        prefill_token=9,
        context_token=0.05,
        attended=0.02,
        schedule_us=90,
        handover_us=400,
        decode_residuals=tuple(factors),
        prefill_residuals=tuple(random.lognormvariate(0, 0.1) for _ in range(90)),
    )


def played(folder: Path, admission: str, seed: int) -> Trace:
    """What a burst of 64 brings on such a machine, where 57 of them fit at their ends."""
    settings = [f"admission={admission}", "num_blocks=1200", "block_size=64", "pipeline_depth=2"]
    settings += ["max_num_seqs=64", "enable_prefix_caching=false"]
    config = with_overrides(simulate.DEFAULTS, settings)
    writer = TraceWriter.open(folder, config, BOOT_ID, never)
    arrivals = arrivals_of(uniform(64, 257, 1024, 0, None, 0), config, None)
    Simulation(fresh_scheduler(config), arrivals, noisy_world(seed), writer).run()
    writer.close()
    return Trace.open(folder)


@pytest.mark.parametrize(
    ("logged", "asked_for"), [("watermark", "forecast"), ("greedy", "watermark")]
)
def test_a_noisy_machine_is_seen_through(logged: str, asked_for: str, tmp_path: Path) -> None:
    """Each calibration within 2 %, and the other policy's rate within 10 % of other noise."""
    trace = played(tmp_path / "logged", logged, 1)
    answer = asked(trace, "closed", f"admission={asked_for}")
    assert answer.error_percent < 2
    assert 300 < answer.step_time.handover_us < 500
    before, real = answer.measured, figures_of(load_of(played(tmp_path / "real", asked_for, 2))[0])
    assert answer.changed is not None
    predicted = answer.changed.output_tokens_per_s
    assert predicted == pytest.approx(real.output_tokens_per_s, rel=0.1)
    gained = real.output_tokens_per_s - before.output_tokens_per_s
    assert abs(gained) > 0.08 * before.output_tokens_per_s, "nothing to be predicted"
    assert (predicted > before.output_tokens_per_s) == (gained > 0)


def test_a_percentile_of_a_few_steps_is_not_judged(tmp_path: Path) -> None:
    """It is shown, with how many steps it rests on."""
    answer = asked(run(tmp_path, "--concurrency", "150"), "closed", "max_num_seqs=8")
    last = answer.calibration[-1]
    assert (last.name, last.is_judged) == ("ITL p99", False)
    assert last.num_steps is not None and 0 < last.num_steps < 20
    worse = msgspec.structs.replace(last, simulated=10 * last.measured)
    changed = msgspec.structs.replace(answer, calibration=[*answer.calibration[:-1], worse])
    assert changed.error_percent == answer.error_percent
    many = msgspec.structs.replace(worse, num_steps=20)
    changed = msgspec.structs.replace(answer, calibration=[many])
    assert changed.error_percent == pytest.approx(900, abs=1)


def test_calibration_repeats_stops_failures_and_cancels(tmp_path: Path) -> None:
    """The oracle keeps lengths and reasons; a run in virtual time ends with the same counts."""
    trace = Trace.open(write_run(tmp_path, 400, seed=3))
    answer = what_if(trace, trace.header.config, "open", 1e9)
    assert answer.simulated.num_requests == answer.measured.num_requests
    for name in ("STOP", "LENGTH", "FAILED", "CANCELLED"):
        assert answer.simulated.ended[name] == pytest.approx(answer.measured.ended[name], abs=4)
    refused = {k: v for k, v in answer.measured.ended.items() if k.startswith("REFUSED")}
    assert refused.items() <= answer.simulated.ended.items()


def test_pauses_that_no_model_explains_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 4, the line with the errors, and no comparison."""
    original = run(tmp_path / "a", "--concurrency", "20")
    writer = TraceWriter.open(tmp_path / "b", original.header.config, BOOT_ID, never)
    late = steps = 0
    for record in original.records():
        value = record.value
        if isinstance(value, ClockAdvanced):
            steps += 1
            late += 200_000 if steps % 40 == 0 else 0
            value = ClockAdvanced(now_us=value.now_us + late)
        writer.append(value)
    writer.close()
    assert cli.main(["what-if", str(tmp_path / "b"), "--set", "max_num_seqs=8"]) == 4
    text = capsys.readouterr().out
    assert text.startswith("trace ") or "calibration, measured -> simulated: tok/s" in text
    assert "REFUSED: the simulation is off by" in text
    assert "as logged" not in text
    assert cli.main(["what-if", str(tmp_path / "a"), "--set", "max_num_seqs=8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["changed"]["running"]["max"] == 8


def test_what_cannot_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another block size with hashes of the old one, a log without notes, an unknown field."""
    run(tmp_path)
    path = str(tmp_path)
    for setting, message in (
        ("block_size=32", "the log's hashes are of blocks of 16 tokens"),
        ("policy=best", "'policy=best' is no NAME=VALUE with one of"),
        ("max_num_seqs=many", "Expected `int`, got `str`"),
        ("admission=hopeful", "hopeful"),
    ):
        assert cli.main(["what-if", path, "--set", setting]) == 2
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    changed = ("--set", "block_size=32", "--set", "enable_prefix_caching=false")
    assert cli.main(["what-if", path, *changed]) == 0


def test_a_log_without_notes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without measured step times nothing can be predicted."""
    original = run(tmp_path / "a")
    writer = TraceWriter.open(tmp_path / "b", original.header.config, BOOT_ID, never)
    for record in original.records():
        if not isinstance(record.value, StepNote):
            writer.append(record.value)
    writer.close()
    assert cli.main(["what-if", str(tmp_path / "b"), "--set", "max_num_seqs=8"]) == 2
    assert "0 steps with measured times" in " ".join(
        capsys.readouterr().err.replace("│", " ").split()
    )


@pytest.mark.parametrize("reason", [CancelReason.STOP_STRING, CancelReason.DISCONNECT])
def test_cancels_come_when_they_did(reason: CancelReason) -> None:
    """A stop string after its tokens, a disconnect after its time, whatever the step time."""
    config = with_overrides(simulate.DEFAULTS, ())
    (arrival,) = arrivals_of([WorkloadLine(prompt=10, output=100)], config, None)
    cancellation = Cancellation(reason=reason, after_us=20_500, after_outputs=7)
    request = msgspec.structs.replace(arrival.request, cancellation=cancellation)
    for step_us in (1000, 2000):
        records: list[object] = []
        Simulation(
            Scheduler(config),
            [Arrival(request=request, delay_us=0)],
            StepTime(fixed=step_us),
            records,
        ).run()
        finished = [type(record).__name__ for record in records].count("StepFinished")
        if reason is CancelReason.STOP_STRING:
            assert finished == 7 + 1  # found while the next step ran
        else:
            assert finished == 20_500 // step_us + 1
