"""Exports: JSON lines that are the log, and a Perfetto file that is a picture of it."""

import itertools
import json
from pathlib import Path

import pytest
from trace_samples import write_run

from cearx.core.block_hash import DIGEST_SIZE
from cearx.core.trace_format import frames
from cearx.replay import cli
from cearx.replay.figures import run_figures
from cearx.replay.jsonl import JsonlError, export, rebuild
from cearx.replay.perfetto import document, slices, states
from cearx.replay.timeline import Timeline, timeline_of
from cearx.replay.trace import Trace


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("export"), 300, seed=4)


def timeline_at(path: Path) -> Timeline:
    trace = Trace.open(path)
    return timeline_of(trace.header.config, trace.records())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("close", [True, False])
def test_json_lines_are_the_log(seed: int, close: bool, tmp_path: Path) -> None:
    """There and back gives the same bytes, with an end and without."""
    log = write_run(tmp_path, 60, seed=seed, close=close)
    lines = list(export(Trace.open(log)))
    assert b"".join(rebuild(lines)) == log.read_bytes()
    data = log.read_bytes()
    num_records = sum(frame.num_records for frame in frames(data, Trace(data).segment))
    assert len(lines) == 1 + num_records


def test_json_lines_are_plain(path: Path) -> None:
    """Sorted keys; integers, not floats; hashes in hexadecimal; nothing else."""
    for text in export(Trace.open(path)):
        fields = json.loads(text, parse_float=lambda value: pytest.fail(f"a float: {value}"))
        assert list(fields) == sorted(fields)
        if fields["t"] == "RequestArrived":
            assert all(
                bytes.fromhex(h) and len(h) == 2 * DIGEST_SIZE for h in fields["block_hashes"]
            )
        if fields["t"] == "StepPlan" and fields["chunks"]:
            assert fields["chunks"][0].keys() == {"request_id", "start", "num_tokens", "samples"}


def test_the_commands(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Export to a file and import again; to standard output; nothing asked is refused."""
    lines, again = tmp_path / "log.jsonl", tmp_path / "again.log"
    assert cli.main(["export", str(path), "--jsonl", str(lines)]) == 0
    assert cli.main(["import", str(lines), str(again)]) == 0
    assert again.read_bytes() == path.read_bytes()
    capsys.readouterr()
    assert cli.main(["export", str(path), "--jsonl", "-"]) == 0
    assert capsys.readouterr().out == lines.read_text()
    assert cli.main(["export", str(path)]) == 2
    assert cli.main(["export", str(path), "--jsonl", str(tmp_path / "no" / "x")]) == 2
    assert "cannot open" in capsys.readouterr().out
    assert cli.main(["import", str(lines), str(again)]) == 2  # it exists already


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "line 1: starts with None"),
        ('{"t":"SegmentHeader"}', "line 1: SegmentHeader has the fields"),
        ("[", "line 1: Input data was truncated"),
        ("[]", "line 1: not an object"),
    ],
)
def test_bad_json_lines(text: str, message: str) -> None:
    """The line and what is wrong."""
    with pytest.raises(JsonlError, match=message):
        list(rebuild([text]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("t", "Nothing", "'Nothing' number 5 is no record"),
        ("seq", -1, "line 7"),
        ("seq", 2**70, "line 7"),
        ("seq", "x", "record 'x' stands where record 5 belongs"),
        ("seq", 4, "record 4 stands where record 5"),
        ("extra", 1, "has the fields"),
    ],
)
def test_bad_fields(path: Path, field: str, value: object, message: str, tmp_path: Path) -> None:
    """Wrong names and numbers are refused, and no half-made log is left."""
    lines = list(export(Trace.open(path)))
    fields = json.loads(lines[6])
    fields[field] = value
    lines[6] = json.dumps(fields)
    with pytest.raises(JsonlError, match=message):
        list(rebuild(lines))
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    assert cli.main(["import", str(tmp_path / "bad.jsonl"), str(tmp_path / "made.log")]) == 2
    assert not (tmp_path / "made.log").exists()


def test_slices_are_the_work(path: Path) -> None:
    """No slot does two things at once; chunks and sampled tokens are all there, once."""
    timeline = timeline_at(path)
    pieces = list(slices(timeline))
    by_slot: dict[int, list[tuple[int, int]]] = {}
    for piece in pieces:
        by_slot.setdefault(piece.slot, []).append((piece.first_step, piece.last_step))
    for taken in by_slot.values():
        taken.sort()
        assert all(a[1] < b[0] for a, b in itertools.pairwise(taken))
    assert len(by_slot) <= timeline.config.max_num_seqs
    prefilled = sum(piece.num_tokens for piece in pieces if piece.kind == "prefill")
    assert prefilled == sum(timeline.steps.num_prefill_tokens)
    sampled = {
        (line.request_id, step) for line in timeline.requests.values() for step in line.token_steps
    }
    for piece in pieces:
        for step in range(piece.first_step, piece.last_step + 1):
            sampled.discard((piece.request_id, step))
    assert not sampled


def test_states_have_no_gap(path: Path) -> None:
    """From arrival to end, each state begins where the last one stopped."""
    timeline = timeline_at(path)
    seen: set[str] = set()
    for line in timeline.requests.values():
        found = list(states(line, timeline))
        assert bool(found) == (line.refused is None)
        last = line.arrived_us
        for name, begin, end in found:
            assert begin == last and end >= begin
            last = end
            seen.add(name)
        if found:
            assert last == line.ended_us
        names = [name for name, _, _ in found]
        assert names.count("preempted") == len(line.preemptions)
    assert seen == {"queued", "prefill", "decode", "preempted"}


def test_perfetto(path: Path, tmp_path: Path) -> None:
    """Valid JSON with tracks, async pairs and counters that agree with the figures."""
    timeline = timeline_at(path)
    assert cli.main(["export", str(path), "--perfetto", str(tmp_path / "p.json")]) == 0
    made = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    phases = {phase: [e for e in made if e["ph"] == phase] for phase in "XbeCM"}
    assert sum(map(len, phases.values())) == len(made)
    assert len(phases["b"]) == len(phases["e"])
    assert all(event["dur"] >= 0 for event in phases["X"])
    steps = [event for event in phases["X"] if event["cat"] == "step"]
    assert len(steps) == len(timeline.steps)
    running = [e["args"]["value"] for e in phases["C"] if e["name"] == "running"]
    figures = run_figures(timeline, [])
    assert figures.running is not None
    assert max(running) == figures.running.max
    blocks = [e["args"]["value"] for e in phases["C"] if e["name"] == "free blocks"]
    assert min(blocks) == timeline.config.num_blocks - max(timeline.steps.num_held)


def test_a_window(path: Path) -> None:
    """Only what touches the steps that were asked for."""
    timeline = timeline_at(path)
    made = json.loads("".join(document(timeline, 100, 110)))["traceEvents"]
    steps = [int(e["name"].split()[1]) for e in made if e.get("cat") == "step"]
    assert set(range(100, 111)) <= set(steps) <= set(range(99, 113))
    assert json.loads("".join(document(timeline, 5000)))["traceEvents"]
