"""Traces of torch's profiler: what is in them, and what cannot be started or stopped."""

import gzip
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_tiny, tiny_model
from worker_process import WorkerProcess

from cearx.core.config import WorkerConfig
from cearx.core.messages import Profile, Profiled, SamplingParams

GREEDY = SamplingParams(temperature=0)
PROMPT = list(range(3, 23))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3."""
    return save_tiny(tiny_model("qwen3"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is not there yet."""
    return tmp_path_factory.mktemp("profiles") / "made" / "traces"


@pytest.fixture(scope="module")
def worker(folder: Path, traces: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(folder, profiler_dir=traces) as worker:
        worker.report()
        yield worker


def names(path: Path) -> list[str]:
    """Of all events of a trace."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return [event["name"] for event in events]


def ask(worker: WorkerProcess, is_on: bool, number: int) -> Profiled:
    worker.link.send(Profile(number=number, is_on=is_on, frontend_index=3))
    answer = worker.receive()
    assert isinstance(answer, Profiled), answer
    assert (answer.frontend_index, answer.number) == (3, number)
    return answer


def test_a_trace_holds_the_models_operations(worker: WorkerProcess, traces: Path) -> None:
    """Between start and stop, and only there: steps by their numbers, and what computes them."""
    before = worker.generate([PROMPT], [GREEDY], 5)
    assert worker.ready is not None and worker.ready.has_profiler
    assert ask(worker, True, 1).error is None
    assert worker.generate([PROMPT], [GREEDY], 3) == [before[0][:3]]
    first = ask(worker, False, 2)
    worker.generate([PROMPT], [GREEDY], 5)
    assert first.error is None and first.path is not None
    path = Path(first.path)
    assert path.parent == traces and path.name.endswith(".pt.trace.json.gz")
    found = names(path)
    steps = [name for name in found if name.startswith("step ")]
    assert steps[0] == f"step 0: 0 decodes, {len(PROMPT)} prefill tokens"
    assert steps[1] == "step 1: 1 decodes, 0 prefill tokens"
    # Three with rows, at most one that was planned too many, one that tells the end.
    assert 4 <= len(steps) <= 5
    assert {"aten::embedding", "aten::argmax"} & set(found), sorted(set(found))
    assert sum(name.startswith("aten::") for name in found) > 50
    assert ask(worker, True, 3).error is None
    second = ask(worker, False, 4)
    assert second.path not in (None, first.path)
    assert not any(name.startswith("step ") for name in names(Path(str(second.path))))


def test_what_cannot_be_done_is_said(worker: WorkerProcess, traces: Path) -> None:
    """A second start, a stop of nothing; the first recording goes on."""
    worker.generate([PROMPT], [GREEDY], 1)
    before = set(traces.glob("*"))
    assert ask(worker, False, 1).error == "no profile is recorded"
    assert ask(worker, True, 2).error is None
    assert ask(worker, True, 3).error == "a profile is recorded already"
    assert ask(worker, False, 4).path is not None
    assert len(set(traces.glob("*")) - before) == 1


def test_a_whole_run(folder: Path, tmp_path: Path) -> None:
    """`--profile` records from ready on and writes at the end."""
    with WorkerProcess(folder, profile=tmp_path) as worker:
        worker.report()
        worker.generate([PROMPT], [GREEDY], 4)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.end()[0] == 0
    (path,) = tmp_path.iterdir()
    assert f"step 0: 0 decodes, {len(PROMPT)} prefill tokens" in names(path)


def test_without_a_folder_there_is_no_profiler(folder: Path) -> None:
    """The core is told so, and a question is answered with the flag's name."""
    with WorkerProcess(folder) as worker:
        worker.report()
        worker.generate([PROMPT], [GREEDY], 1)
        assert worker.ready is not None and not worker.ready.has_profiler
        answer = ask(worker, True, 1)
        assert answer.error is not None and "--profiler-dir" in answer.error


def test_a_folder_that_cannot_be_made_ends_the_start(folder: Path, tmp_path: Path) -> None:
    """With its name."""
    (tmp_path / "file").write_text("")
    with WorkerProcess(folder, profiler_dir=tmp_path / "file" / "traces") as worker:
        report = worker.report()
        assert "cannot write profiles to" in getattr(report, "reason", "")
    with pytest.raises(ValueError, match="--profile a and --profiler-dir b"):
        WorkerConfig(profile=Path("a"), profiler_dir=Path("b"))
