"""Result files: JSON with one or more runs, each a list of rows, one a point.

Owns the format and that a file is never seen half-written. A row's fields carry the names of
`vllm bench serve`. Written by `session.py` for the verbs that measure.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from cearx.frontend.bench.bench_error import BenchError

FORMAT = "cearx-bench-1"


class BenchRun(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One engine's rows."""

    engine: str
    """Who was measured: the label of a table's column."""
    model: str
    kind: str
    """'matrix' or 'serve'."""
    date: str | None = None
    hardware: str | None = None
    method: str | None = None
    """How it was measured, in words or as the command's settings."""
    settings: dict[str, Any] = {}
    points: list[dict[str, Any]] = []


class ResultFile(msgspec.Struct, kw_only=True):
    format: str = FORMAT
    runs: list[BenchRun]


def write_results(path: Path, runs: list[BenchRun]) -> None:
    """Replaces the file at once; raises BenchError."""
    body = msgspec.json.format(msgspec.json.encode(ResultFile(runs=runs)), indent=1)
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(body + b"\n")
        os.replace(partial, path)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error


def read_results(path: Path) -> list[BenchRun]:
    """Raises BenchError for what is no result file."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=ResultFile)
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BenchError(f"{path} is no result file: {error}") from error
    if file.format != FORMAT:
        raise BenchError(f"{path} has the format {file.format!r}, {FORMAT!r} is understood")
    return file.runs
