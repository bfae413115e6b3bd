"""`cearx replay`: exit codes, words, and no torch; the same answer in any process."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from trace_samples import write_run

from cearx.core.scheduler_source import scheduler_sha256
from cearx.core.trace_batch import split
from cearx.core.trace_format import HEADER_BYTES, RecordType, encode_frame, frames, salt_crc
from cearx.core.trace_records import SCHEMA_VERSION, encode_record
from cearx.replay import cli
from cearx.replay.trace import Trace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_run(tmp_path, 60, seed=4)


def rewrite(path: Path, record_type: int, **fields: object) -> None:
    """Other fields in the last record of a type, with a right checksum."""
    data = path.read_bytes()
    trace = Trace(data)
    salted = salt_crc(trace.segment.salt)
    parts = [data[:HEADER_BYTES]]
    all_frames = [record for frame in frames(data, trace.segment) for record in split(frame)]
    last = max(frame.seq for frame in all_frames if frame.type == record_type)
    records = {0: trace.header} | {record.seq: record.value for record in trace.records()}
    for frame in all_frames:
        payload = (frame.type, frame.flags, frame.payload)
        if frame.seq == last:
            payload = encode_record(msgspec.structs.replace(records[last], **fields))
        parts.append(encode_frame(salted, frame.seq, *payload))
    path.write_bytes(b"".join(parts))


def test_same(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0 with the figures of the run, for a file, its link and its folder."""
    texts = []
    for argument in (path, path.parent / "trace.log", path.parent):
        assert cli.main([str(argument)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].replace(str(path), "") == texts[2].replace(str(path.parent), "")
    lines = texts[0].splitlines()
    assert lines[0].startswith(f"SAME {path}: every decision of ")
    assert [line.split()[0] for line in lines[1:]] == [
        "requests",
        "steps",
        "tokens",
        "step",
        "scheduler",
    ]
    assert lines[-1].endswith("the one that was logged")


def test_killed_and_torn(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log without an end, or with a last record that is not whole, verifies with a note."""
    data = path.read_bytes()
    starts = [frame.offset for frame in frames(data, Trace(data).segment)]
    path.write_bytes(data[: starts[-1]])
    assert cli.main([str(path)]) == 0
    assert "note: the log has no end" in capsys.readouterr().out
    path.write_bytes(data[: starts[-1] - 3])
    assert cli.main([str(path)]) == 0
    torn = starts[-1] - 3 - starts[-2]
    expected = f"note: the last record is not whole ({torn} bytes from offset {starts[-2]})"
    assert expected in capsys.readouterr().out


def test_diverged(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1; with the scheduler that wrote the log the difference is a bug."""
    rewrite(path, RecordType.STEP_PLAN, preempted=(77,))
    assert cli.main([str(path)]) == 1
    text = capsys.readouterr().out
    assert "StepPlan.preempted[0:]" in text
    assert "logged    [77]" in text and "computed  []" in text and "requests  77" in text
    assert "-> bug" in text and "behaviour change" not in text
    assert "the last 20 inputs:" in text


def test_diverged_from_another_scheduler(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With another scheduler in the header the same difference is a change of behaviour."""
    rewrite(path, RecordType.HEADER, scheduler_sha256="ab" * 32, code_version="0.0.9")
    assert cli.main([str(path)]) == 0
    running = scheduler_sha256()[:8]
    assert f"{running} repeats what abababab (cearx 0.0.9) did" in capsys.readouterr().out
    rewrite(path, RecordType.STEP_PLAN, preempted=(77,))
    assert cli.main([str(path)]) == 1
    text = capsys.readouterr().out
    assert "logged by scheduler abababab of cearx 0.0.9" in text
    assert "-> behaviour change" in text and "-> bug" not in text


def test_damaged(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 with the offset of the first bad record."""
    data = bytearray(path.read_bytes())
    frame = list(frames(bytes(data), Trace(bytes(data)).segment))[20]
    data[frame.offset + 20] ^= 4
    path.write_bytes(data)
    assert cli.main([str(path)]) == 2
    assert f"DAMAGED {path} at offset {frame.offset}: a bad record" in capsys.readouterr().out


def test_unreadable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file is one clear line and exit 2."""
    assert cli.main([str(tmp_path / "none")]) == 2
    assert (
        capsys.readouterr().out == f"cannot open {tmp_path / 'none'}: No such file or directory\n"
    )


def test_incompatible(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 3 for another schema."""
    rewrite(path, RecordType.HEADER, schema_version=SCHEMA_VERSION + 1)
    assert cli.main([str(path)]) == 3
    assert f"schema {SCHEMA_VERSION + 1}, this version reads" in capsys.readouterr().out


VERBS = {
    "verify": [],
    "stats": [],
    "why": ["0"],
    "at": ["--step", "50"],
    "check": [],
    "diff": [],
    "what-if": ["--set", "max_num_seqs=4"],
    "shrink": [],
    "export": ["--jsonl", "-"],
    "report": [],
}
"""Each verb that reads a trace, with what it needs besides."""


def arguments(verb: str, path: Path, folder: Path) -> list[str]:
    more = {
        "diff": [str(path)],
        "shrink": ["--out", str(folder / "s")],
        "report": ["--out", str(folder / "r.html")],
    }
    return [verb, str(path), *VERBS[verb], *more.get(verb, [])]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Every verb stands in the help with a line of its own, and has a help itself."""
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for verb in (*VERBS, "import"):
        assert f"│ {verb} " in text
        assert cli.main([verb, "--help"]) == 0
        assert f"Usage: cearx replay {verb}" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert set(VERBS) | {"import"} == cli.VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_a_bad_trace(
    verb: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged: 2; another schema: 3; missing or no trace at all: 2. One line, never a traceback."""
    bad = tmp_path / "bad"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    bad.write_bytes(data)
    assert cli.main(arguments(verb, bad, tmp_path)) == 2
    assert f"DAMAGED {bad} at offset" in capsys.readouterr().out
    for text in (b"", b"no trace log at all", b"\0" * 5000):
        bad.write_bytes(text)
        assert cli.main(arguments(verb, bad, tmp_path)) == 2
        assert capsys.readouterr().out.startswith(f"DAMAGED {bad} at offset")
    assert cli.main(arguments(verb, tmp_path / "none", tmp_path)) == 2
    assert (
        capsys.readouterr().out == f"cannot open {tmp_path / 'none'}: No such file or directory\n"
    )
    rewrite(path, RecordType.HEADER, schema_version=SCHEMA_VERSION + 1)
    assert cli.main(arguments(verb, path, tmp_path)) == 3
    assert capsys.readouterr().out.startswith(f"INCOMPATIBLE {path}")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_answers(
    verb: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole trace: an answer and the exit code that says what it is."""
    expected = {"shrink": 1, "what-if": 4}  # nothing fails; these notes are no model's
    assert cli.main(arguments(verb, path, tmp_path)) == expected.get(verb, 0)
    assert capsys.readouterr().out


def test_escapes_in_a_header_are_not_obeyed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A version with terminal escapes is printed as text."""
    rewrite(path, RecordType.HEADER, scheduler_sha256="\x1b[2J", code_version="\x1b]0;x\x07\n")
    assert cli.main([str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def python(code: str, *arguments: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


REPLAY = "import sys; from cearx.replay.cli import main; sys.exit(main(sys.argv[1:]))"


def test_hash_seeds_do_not_matter(path: Path) -> None:
    """Other processes with other hash seeds verify the trace and print the same."""
    outputs = {python(REPLAY, str(path), PYTHONHASHSEED=seed) for seed in ("0", "1", "random")}
    assert len(outputs) == 1
    assert outputs.pop().startswith("SAME")


WRITE = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from trace_samples import write_run
write_run(Path(sys.argv[1]), 60, seed=4)
"""


def test_hash_seeds_do_not_matter_when_writing(tmp_path: Path) -> None:
    """The same run under another hash seed has the same records."""
    logs = []
    for seed in ("0", "1"):
        python(WRITE, str(tmp_path / seed), *sys.path, PYTHONHASHSEED=seed)
        logs.append([record.value for record in Trace.open(tmp_path / seed).records()])
    assert logs[0] == logs[1] and len(logs[0]) > 200


def test_no_torch(path: Path) -> None:
    """Replay needs neither torch nor anything of the other processes."""
    code = REPLAY.replace("sys.exit(main(sys.argv[1:]))", "assert main(sys.argv[1:]) == 0\n")
    code += (
        "heavy = {'torch', 'numpy', 'zmq', 'transformers', 'hypercorn', 'starlette'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
        "ours = {name.split('.')[1] for name in sys.modules if name.startswith('cearx.')}\n"
        "assert ours == {'core', 'replay'}, ours\n"
    )
    assert python(code, str(path)).startswith("SAME")


def test_nothing_is_executed_from_a_file() -> None:
    """The modules that read a trace hold no call that could run or load what it names."""
    folder = Path(cli.__file__).parent
    core = Path(sys.modules["cearx.core.trace_format"].__file__ or "").parent
    files = [*folder.glob("*.py"), core / "trace_format.py", core / "trace_records.py"]
    for file in files:
        text = file.read_text()
        for word in ("eval(", "exec(", "pickle", "marshal", "__import__", "import_module"):
            assert word not in text, f"{file.name} has {word}"


def test_a_named_pipe_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing waits for a writer that may never come."""
    os.mkfifo(tmp_path / "pipe")
    assert cli.main([str(tmp_path / "pipe")]) == 2
    assert "not a regular file" in capsys.readouterr().out


def test_output_that_nobody_takes_changes_no_verdict(path: Path) -> None:
    """A full disk under standard output is not a divergence."""
    command = [sys.executable, "-P", "-m", "cearx.core.cli", "replay", str(path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
