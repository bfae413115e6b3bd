"""Synthetic loads: the trace is one like any other, and loads keep their promises."""

import itertools
import json
from pathlib import Path

import pytest

from cearx.core import cli as core_cli
from cearx.core.events import FinishReason
from cearx.replay import cli, simulate
from cearx.replay.figures import percentile
from cearx.replay.timeline import Timeline, timeline_of
from cearx.replay.trace import Trace
from cearx.replay.workload import WorkloadError, read_workload


def simulated(tmp_path: Path, *arguments: str) -> Timeline:
    """Runs the command, verifies its trace, answers what is in it."""
    assert simulate.main([*arguments, "--trace", str(tmp_path)]) == 0
    assert cli.main([str(tmp_path)]) == 0
    assert cli.main(["check", str(tmp_path)]) == 0
    trace = Trace.open(tmp_path)
    timeline = timeline_of(trace.header.config, trace.records())
    assert trace.ended
    return timeline


def test_closed_loop(tmp_path: Path) -> None:
    """As many requests live at each moment as were asked for, until the last ones come."""
    timeline = simulated(
        tmp_path, "--concurrency", "8", "--num-requests", "40", "--output-len", "20"
    )
    lines = list(timeline.requests.values())
    assert len(lines) == 40 and all(len(line.token_steps) == 20 for line in lines)
    live = [
        running + waiting
        for running, waiting in zip(
            timeline.steps.num_running, timeline.steps.num_waiting, strict=True
        )
    ]
    assert max(live) == 8
    last_arrival = max(line.arrived_step for line in lines)
    assert set(live[: last_arrival - 1]) == {8}


def test_open_loop(tmp_path: Path) -> None:
    """Arrivals follow the rate whatever the server does, and the seed decides them."""
    timeline = simulated(
        tmp_path, "--rate", "50", "--num-requests", "300", "--output-len", "2", "--seed", "3"
    )
    arrived = [line.arrived_us for line in timeline.requests.values()]
    gaps = sorted(b - a for a, b in itertools.pairwise(arrived))
    assert 14_000 < sum(gaps) / len(gaps) < 26_000
    assert percentile(gaps, 99) > 3 * percentile(gaps, 50)


def test_step_times_are_the_models(tmp_path: Path) -> None:
    """Notes and clock readings are what the coefficients give."""
    timeline = simulated(
        tmp_path,
        *("--num-requests", "3", "--input-len", "100", "--output-len", "4"),
        *("--fixed-us", "1000", "--prefill-us", "50", "--decode-us", "7"),
        *("--prefill-token-us", "2", "--context-token-us", "0"),
    )
    assert list(timeline.steps.execute_us) == [1000 + 50 + 600, 1021, 1021, 1021]
    assert timeline.steps.planned_us[1] == 1650 + 100 + 100


def test_shared_prefix(tmp_path: Path) -> None:
    """Later prompts find the shared blocks and no others."""
    timeline = simulated(
        tmp_path,
        *("--num-requests", "5", "--input-len", "100", "--shared-prefix", "70"),
        *("--concurrency", "1", "--output-len", "3"),
    )
    assert [line.num_hit_tokens for line in timeline.requests.values()] == [0, 64, 64, 64, 64]


def test_workload_file(tmp_path: Path) -> None:
    """Sizes, times and ends are as the file says."""
    file = tmp_path / "load.jsonl"
    lines = [
        {"prompt": 10, "output": 3, "at_us": 50_000, "max_tokens": 9},
        {"prompt": 20, "output": 2},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    timeline = simulated(tmp_path / "trace", str(file))
    first, second = timeline.requests.values()
    assert (first.num_prompt_tokens, first.max_tokens, len(first.token_steps)) == (20, 2, 2)
    assert (second.num_prompt_tokens, second.max_tokens) == (10, 9)
    assert (len(second.token_steps), second.ended) == (3, FinishReason.STOP)
    assert second.arrived_us == 50_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no request in the workload"),
        ('{"prompt": 1}', "line 1: Object missing required field `output`"),
        ('\n{"prompt": 0, "output": 1}', "line 2: Expected `int` >= 1"),
        ('{"prompt": 1, "output": 1, "x": 2}', "line 1: Object contains unknown field `x`"),
        ('{"prompt": 1, "output": 9, "max_tokens": 8}', "output 9 is over max_tokens 8"),
        ('{"prompt": 1, "output": 9, "shared": 2}', "shared 2 is over prompt 1"),
        ("[" * 100_000, "line 1: "),
    ],
)
def test_bad_workloads(text: str, message: str) -> None:
    """The line and the limit are named."""
    with pytest.raises(WorkloadError, match=message):
        read_workload(text.split("\n"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "max_num_seqs=0"], "max_num_seqs must be at least 1, got 0"),
        (["--set", "seats=3"], "'seats=3' is no NAME=VALUE with one of block_size"),
        (["--set", "num_blocks=99999999"], "a pool of 99999999 blocks, the limit is"),
        (["--rate", "3", "--concurrency", "2"], "is a closed loop and --rate an open one"),
        (["missing.jsonl"], "cannot read missing.jsonl: No such file or directory"),
        (["--num-requests", "0"], "should be greater than or equal to 1"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 and a message with the value and the limit."""
    assert core_cli.main(["simulate", *arguments, "--trace", str(tmp_path)]) == 2
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in text
