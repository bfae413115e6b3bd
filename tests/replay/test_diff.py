"""`diff`: equal logs are the same, others differ where they first do, with the effect on each."""

import json
from pathlib import Path

import pytest
from trace_samples import write_run

from cearx.replay import cli, simulate
from cearx.replay.diff import compare
from cearx.replay.trace import Trace

LOAD = ("--concurrency", "20", "--num-requests", "60", "--output-len", "50", "--seed", "1")


def run(folder: Path, *settings: str) -> Path:
    flags = [part for setting in settings for part in ("--set", setting)]
    assert simulate.main([*LOAD, *flags, "--trace", str(folder)]) == 0
    return folder


def compared(left: Path, right: Path) -> object:
    return compare((left, Trace.open(left)), (right, Trace.open(right)))


def test_the_same_run_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two boots, equal decisions: exit 0 and no request fares otherwise."""
    left, right = run(tmp_path / "a"), run(tmp_path / "b")
    capsys.readouterr()
    assert cli.main(["diff", str(left), str(right)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("SAME decisions")
    assert "fare otherwise" not in text


def test_another_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The configuration, the first step, the effect on each request with its sign, the totals."""
    left, right = run(tmp_path / "a"), run(tmp_path / "b", "max_num_batched_tokens=300")
    capsys.readouterr()
    assert cli.main(["diff", str(left), str(right), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["config"] == {"max_num_batched_tokens": ["2048", "300"]}
    assert answer["first"]["step_id"] == 0
    assert answer["first"]["field"].startswith("StepPlan.chunks[1]")
    sizes = [max(abs(e["waited_us"]), abs(e["ttft_us"])) for e in answer["effects"]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 0
    figures = {}
    for name, folder in (("left", left), ("right", right)):
        assert cli.main(["stats", str(folder), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["run"] == answer[name]
        figures[name] = {f["request_id"]: f for f in found["requests"]}
    for effect in answer["effects"]:
        a, b = figures["left"][effect["left_id"]], figures["right"][effect["right_id"]]
        assert effect["waited_us"] == b["waited_us"] - a["waited_us"]
        assert effect["ttft_us"] == b["ttft_us"] - a["ttft_us"]
        assert effect["preemptions"] == b["num_preemptions"] - a["num_preemptions"]
    assert cli.main(["diff", str(left), str(right), "--limit", "3"]) == 1
    text = capsys.readouterr().out
    assert "DIFFERS first at step 0: StepPlan.chunks[1" in text
    assert "config max_num_batched_tokens: 2048 -> 300" in text
    assert "57 more" in text or "more (--limit" in text


def test_another_load(tmp_path: Path) -> None:
    """Prompts of other lengths differ before any decision; a longer log has requests of its own."""
    left = write_run(tmp_path / "a", 60, seed=1)
    right = write_run(tmp_path / "b", 60, seed=2)
    found = compared(left, right)
    assert found.first is not None and found.first.field.startswith("RequestArrived.")
    longer = write_run(tmp_path / "c", 90, seed=1)
    found = compared(left, longer)
    assert found.first is not None
    assert found.num_unmatched > 0


def test_a_damaged_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 with the path of the log that is damaged, whichever it is."""
    good, bad = write_run(tmp_path / "a", 60, seed=1), write_run(tmp_path / "b", 60, seed=1)
    data = bytearray(bad.read_bytes())
    data[len(data) // 2] ^= 1
    bad.write_bytes(data)
    for arguments in ([good, bad], [bad, good], [bad, bad]):
        assert cli.main(["diff", *map(str, arguments)]) == 2
        assert capsys.readouterr().out.startswith(f"DAMAGED {bad} at offset")
