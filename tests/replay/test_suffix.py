"""Every verb on a log that begins within its run, and across a gap."""

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from random_run import DEEP, LIMITED, PIPELINED, SMALL, URGENT
from trace_samples import SegmentedRun

from cearx.core.config import SchedulerConfig
from cearx.core.events import RequestArrived, RequestEnded, StepPlan
from cearx.core.identifiers import RequestId, StepId
from cearx.core.trace_format import decode_header, encode_frame, encode_header, frames, salt_crc
from cearx.core.trace_records import GapReason, StepNote, TraceGap, TraceSnapshot, encode_record
from cearx.replay import cli
from cearx.replay.figures import request_figures
from cearx.replay.invariants import Checker
from cearx.replay.ledger import Ledger
from cearx.replay.state_at import NoSuchStep, state_at
from cearx.replay.timeline import timeline_of
from cearx.replay.trace import Trace, TraceRecord
from cearx.replay.why import explain

CONFIGS = {"depth 1": SMALL, "depth 2": PIPELINED, "priority": URGENT, "limits": LIMITED}
CONFIGS["depth 3"] = DEEP


def write(folder: Path, config: SchedulerConfig, num_steps: int = 120) -> list[Path]:
    run = SegmentedRun(folder, 11, config=config)
    run.steps(num_steps)
    run.close()
    return sorted(folder.glob("trace-*.log"))


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS)
def paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = write(tmp_path_factory.mktemp("run"), request.param)
    assert len(found) >= 4
    return found


@pytest.fixture(scope="module")
def with_gap(tmp_path_factory: pytest.TempPathFactory, paths: list[Path]) -> Path:
    """A run whose third segment is lost, as a writer leaves it whose disk was full meanwhile."""
    folder = tmp_path_factory.mktemp("gap")
    kept = [path.read_bytes() for path in (*paths[:2], *paths[3:])]
    last_seq = [frame.seq for frame in frames(kept[1], decode_header(kept[1]))][-1]
    for number, (data, path) in enumerate(zip(kept, paths, strict=False)):
        header = msgspec.structs.replace(decode_header(data), segment=number)
        if number == 2:
            data = behind_gap(data, last_seq)
        else:
            data = encode_header(header) + data[len(encode_header(header)) :]
        (folder / path.name).write_bytes(data)
    (folder / "trace.log").symlink_to(paths[len(kept) - 1].name)
    return folder


def behind_gap(data: bytes, last_seq: int) -> bytes:
    header = decode_header(data)
    first_seq = header.first_seq - 1
    changed = msgspec.structs.replace(
        header, segment=2, first_seq=first_seq, prev_last_seq=last_seq
    )
    lost = TraceGap(reason=GapReason.WRITE_FAILED, first_lost=last_seq + 1, end_lost=first_seq)
    first, *others = frames(data, header)
    records = [(first_seq, (first.type, first.flags, first.payload))]
    records.append((first_seq + 1, encode_record(lost)))
    records += [(frame.seq, (frame.type, frame.flags, frame.payload)) for frame in others]
    salted = salt_crc(header.salt)
    return encode_header(changed) + b"".join(encode_frame(salted, s, *r) for s, r in records)


SAME = ["request_id", "num_tokens", "num_pending", "num_planned", "num_written", "block_ids"]
SAME += ["is_running", "block_hashes", "num_published", "publishes", "priority", "deadline_us"]


def books(ledger: Ledger) -> object:
    """All that a ledger knows and that does not tell lives before the log."""
    blocks = ledger.blocks
    return (
        [[getattr(r, name) for name in SAME] for r in ledger.live.values()],
        (ledger.now_us, ledger.step_id, ledger.num_running, blocks.num_held, blocks.num_cached),
        list(ledger.in_flight),
        blocks.fenced(),
        [blocks.num_holders(block) for block in range(ledger.config.num_blocks)],  # type: ignore[arg-type]
        [blocks.content(block) for block in range(ledger.config.num_blocks)],  # type: ignore[arg-type]
    )


def test_books_from_a_snapshot_are_those_from_the_start(paths: list[Path]) -> None:
    """At each boundary and behind every record after it, whatever is in flight there."""
    whole = Trace.open(paths[0].parent)
    config = whole.header.config
    from_start, restored = Ledger(config), None
    num_compared = num_in_flight = 0
    for record in whole.records():
        from_start.apply(record.value)
        if isinstance(record.value, TraceSnapshot):
            restored = Ledger(config)
            num_in_flight += bool(from_start.in_flight)
        if restored is not None:
            restored.apply(record.value)
            assert books(restored) == books(from_start), record
            num_compared += 1
    assert num_compared > 300 and (num_in_flight or config.pipeline_depth == 1)


def states(trace: Trace, steps: range) -> list[object]:
    found: list[object] = []
    for step in steps:
        try:
            found.append(state_at(trace, StepId(step), "planned"))
        except NoSuchStep:
            found.append(None)
    return found


def test_at_is_the_same_from_a_suffix(paths: list[Path]) -> None:
    """Each step of the second half, read from the whole run and from its last segments."""
    whole, part = Trace.open(paths[0].parent), Trace.open(paths[len(paths) // 2])
    plans = [r.value.step_id for r in part.records() if isinstance(r.value, StepPlan)]
    steps = range(plans[0], plans[-1] + 1, 5)
    assert states(part, steps) == states(whole, steps)
    assert None not in states(part, steps)


def test_no_rule_is_broken(
    paths: list[Path], with_gap: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From each segment on, and behind a gap."""
    for path in (*paths, with_gap):
        assert cli.main(["check", str(path)]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "the log begins within the run, with segment 1" in out
    assert "are lost (WRITE_FAILED)" in out


def test_a_fault_in_a_suffix_is_found(paths: list[Path]) -> None:
    """A block that a request from before the log holds is granted to another."""
    part = Trace.open(paths[2])
    checker = Checker(part.header.config)
    rules: set[str] = set()
    for record in part.records():
        plan = record.value
        held = [b for r in checker.ledger.running() for b in r.block_ids[-1:]]
        if isinstance(plan, StepPlan) and plan.granted and not plan.preempted and held:
            hits = {a.request_id: a.num_cached_tokens for a in plan.admitted}
            last = plan.granted[-1]
            if hits.get(last.request_id, 0) == 0:
                wrong = msgspec.structs.replace(last, block_ids=(held[0],))
                plan = msgspec.structs.replace(plan, granted=(*plan.granted[:-1], wrong))
                found = checker.feed(msgspec.structs.replace(record, value=plan))
                rules = {violation.invariant for violation in found}
                break
        assert not checker.feed(record)
    assert "I2" in rules


def later_arrivals(records: list[TraceRecord]) -> set[RequestId]:
    return {r.value.request_id for r in records if isinstance(r.value, RequestArrived)}


def test_figures_of_a_suffix(paths: list[Path]) -> None:
    """Who came later has the same figures; of the others nothing is said that is not known.

    Times to within a thousandth of a second: when the first step begins is known less exactly.
    """
    whole, part = Trace.open(paths[0].parent), Trace.open(paths[2])
    config = whole.header.config
    every, some = timeline_of(config, whole.records()), timeline_of(config, part.records())
    later = later_arrivals(list(part.records()))
    carried_over = some.requests.keys() - later
    assert later and carried_over
    for request_id in later:
        left, right = every.requests[request_id], some.requests[request_id]
        pairs = [
            msgspec.structs.asdict(request_figures(*of)) for of in ((left, every), (right, some))
        ]
        for name, expected in pairs[0].items():
            is_time = name.endswith("_us") and expected is not None
            assert pairs[1][name] == (pytest.approx(expected, abs=1000) if is_time else expected)
    for request_id in carried_over:
        figures = request_figures(some.requests[request_id], some)
        assert (figures.queue_us, figures.ttft_us, figures.total_us) == (None, None, None)
        assert figures.ended == request_figures(every.requests[request_id], every).ended


def test_figures_across_a_gap(with_gap: Path, paths: list[Path]) -> None:
    """Who ended in the gap is lost, who got in there is there, nobody else changes."""
    trace = Trace.open(with_gap)
    timeline = timeline_of(trace.header.config, trace.records())
    lost = [line for line in timeline.requests.values() if line.lost]
    ended = {
        r.value.request_id
        for r in Trace.open(paths[2]).records()
        if isinstance(r.value, RequestEnded) and r.segment == 2
    }
    assert {line.request_id for line in lost} <= ended
    for line in timeline.requests.values():
        figures = request_figures(line, timeline)
        assert (figures.ended == "LOST") == line.lost
        assert line.lost or line.ended_us is not None, "all end, or in the gap"


def test_why_tells_what_is_missing(paths: list[Path], with_gap: Path) -> None:
    """One who was there before: a span that says so; then as in the whole run."""
    whole, part = Trace.open(paths[0].parent), Trace.open(paths[2])
    carried_over = Ledger(whole.header.config)
    first = next(part.records())
    carried_over.apply(first.value)
    for request_id in carried_over.live:
        spans = explain(part.header.config, part.records(), request_id)
        assert spans[0].what == "carried over"
        everything = explain(whole.header.config, whole.records(), request_id)
        assert spans[-1] == everything[-1]
        assert sum(s.num_tokens for s in spans) <= sum(s.num_tokens for s in everything)
    trace = Trace.open(with_gap)
    config, records = trace.header.config, list(trace.records())
    at = next(i for i, r in enumerate(records) if isinstance(r.value, TraceGap))
    before = Ledger(config)
    for record in records[:at]:
        before.apply(record.value)
    assert before.live
    for request_id in before.live:
        what = [span.what for span in explain(config, records, request_id)]
        assert what[what.index("gap") + 1] in ("carried over", "lost")


@pytest.mark.parametrize("kind", ["suffix", "gap"])
def test_verbs_that_need_the_whole_run_refuse(
    kind: str,
    paths: list[Path],
    with_gap: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line with the reason, exit 2."""
    path = with_gap if kind == "gap" else paths[1]
    for arguments in (
        ["what-if", str(path), "--set", "max_num_seqs=2"],
        ["shrink", str(path), "--out", str(tmp_path / "out")],
        ["diff", str(paths[0].parent), str(path)],
        ["diff", str(path), str(paths[0].parent)],
    ):
        assert cli.main(arguments) == 2
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"REFUSED {path}: this needs the whole run, and ")
        assert ("lost" if kind == "gap" else "segment 1") in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["suffix", "gap"])
def test_the_other_verbs_answer(
    kind: str,
    paths: list[Path],
    with_gap: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Verify, stats, both exports and the report; the texts say what is missing."""
    path = with_gap if kind == "gap" else paths[1]
    assert cli.main(["verify", str(path)]) == 0
    assert cli.main(["stats", str(path)]) == 0
    texts = capsys.readouterr().out
    assert texts.count("note: ") >= 2
    assert cli.main(["export", str(path), "--perfetto", str(tmp_path / "p.json")]) == 0
    assert json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    assert cli.main(["report", str(path), "--out", str(tmp_path / "r.html")]) == 0
    assert cli.main(["export", str(path), "--jsonl", str(tmp_path / "lines")]) == 0


def test_exported_segments_are_imported(paths: list[Path], tmp_path: Path) -> None:
    """One by one the same bytes; several in one file are refused."""
    lines = tmp_path / "lines.jsonl"
    for path in (paths[0], paths[1], paths[-1]):
        alone = tmp_path / "alone.bin"
        alone.write_bytes(path.read_bytes())
        assert cli.main(["export", str(alone), "--jsonl", str(lines)]) == 0
        again = tmp_path / f"again-{path.name}"
        assert cli.main(["import", str(lines), str(again)]) == 0
        assert again.read_bytes() == path.read_bytes()
    assert cli.main(["export", str(paths[0]), "--jsonl", str(lines)]) == 0
    kinds = [json.loads(line)["t"] for line in lines.read_text().splitlines()]
    assert kinds.count("SegmentHeader") == kinds.count("TraceHeader") == len(paths)
    assert cli.main(["import", str(lines), str(tmp_path / "no")]) == 2
    assert not (tmp_path / "no").exists()


def test_all_bytes_of_all_segments_count(paths: list[Path]) -> None:
    """The log's bytes a step are those of the whole run."""
    trace = Trace.open(paths[0].parent)
    assert trace.num_bytes_in_all == sum(path.stat().st_size for path in paths)
    notes = itertools.filterfalse(lambda r: isinstance(r.value, StepNote), trace.records())
    assert sum(1 for _ in notes) > 100
