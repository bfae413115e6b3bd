"""`cearx bench compare`: one engine's points beside the best of a baseline's engines.

Owns the pairing of points and the ratios: throughput is better when higher, times when lower, so a
ratio above 1 means that the results are ahead in either. Repeats of a point count by their median.
Pure but for the printing; called by `cli.py`.
"""

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console

from cearx.frontend.bench.bench_error import BenchError
from cearx.frontend.bench.results import BenchRun

METRICS = (
    ("output_throughput", "out tok/s", True),
    ("median_ttft_ms", "TTFT p50 ms", False),
    ("median_tpot_ms", "TPOT p50 ms", False),
    ("p99_itl_ms", "ITL p99 ms", False),
)
"""Field, heading, whether higher is better."""
NAME_WIDTH = 18
CELL = 28


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One metric at one point; `engine` is the best of the baseline."""

    ours: float
    best: float
    engine: str
    ratio: float
    """Above 1 when ours is better."""


class PointComparison(msgspec.Struct, frozen=True, kw_only=True):
    point: str
    metrics: dict[str, Compared]
    """Those that both sides have."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    points: list[PointComparison]
    failed: list[str]
    """Points of the results that are not exact and complete; they have no ratio."""
    missing: list[str]
    """Points of the baseline that the results do not have."""


def plain(name: str) -> str:
    """A model's name for comparing: the last part of a path or id, letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", name.rstrip("/").rsplit("/", 1)[-1].lower())


def point_name(row: dict[str, Any]) -> str:
    """What makes two rows the same point."""
    if "concurrency" in row:
        return f"C{row['concurrency']}/I{row['input_len']}/O{row['output_len']}"
    return f"{row.get('request_rate')} req/s, at most {row.get('max_concurrency')} at once"


def choose_baseline(runs: Sequence[BenchRun], model: str) -> list[BenchRun]:
    """The runs of one model; raises BenchError when there are none."""
    chosen = [run for run in runs if plain(run.model) == plain(model)]
    if not chosen:
        known = ", ".join(sorted({run.model for run in runs})) or "none"
        raise BenchError(f"the baseline has no model {model!r} (it has {known}): name one, --model")
    return chosen


def medians(run: BenchRun) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Point -> field -> median of its repeats, and the points with a failed repeat."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in run.points:
        rows.setdefault(point_name(row), []).append(row)
    good: dict[str, dict[str, float]] = {}
    failed = []
    for name, repeats in rows.items():
        if any(row.get("status", "ok") != "ok" for row in repeats):
            failed.append(name)
            continue
        good[name] = {
            field: statistics.median(row[field] for row in repeats)
            for field, _, _ in METRICS
            if all(row.get(field) is not None for row in repeats)
        }
    return good, failed


def compare(baseline: Sequence[BenchRun], ours: BenchRun) -> Comparison:
    """Raises BenchError when no point is in both."""
    theirs = {run.engine: medians(run)[0] for run in baseline}
    good, failed = medians(ours)
    points = []
    for name, figures in good.items():
        metrics = {}
        for field, _, is_higher_better in METRICS:
            known = {
                engine: rows[name][field]
                for engine, rows in theirs.items()
                if field in rows.get(name, {})
            }
            if field in figures and known:
                metrics[field] = _metric(figures[field], known, is_higher_better)
        if metrics:
            points.append(PointComparison(point=name, metrics=metrics))
    known_points = {name for rows in theirs.values() for name in rows}
    if not points and not failed:
        raise BenchError("the two files have no point in common")
    seen = {*good, *failed}
    missing = [name for rows in theirs.values() for name in rows if name not in seen]
    return Comparison(
        engine=ours.engine,
        points=points,
        failed=[name for name in failed if name in known_points],
        missing=list(dict.fromkeys(missing)),
    )


def _metric(ours: float, theirs: dict[str, float], is_higher_better: bool) -> Compared:
    choose = max if is_higher_better else min
    engine = choose(theirs, key=lambda name: theirs[name])
    better, worse = (ours, theirs[engine]) if is_higher_better else (theirs[engine], ours)
    ratio = better / worse if worse > 0 else math.inf
    return Compared(ours=ours, best=theirs[engine], engine=engine, ratio=ratio)


def geometric_mean(values: Sequence[float]) -> float:
    assert values and min(values) > 0, f"a geometric mean needs positive values, got {values}"
    return math.exp(sum(map(math.log, values)) / len(values))


def show(comparison: Comparison, baseline: Sequence[BenchRun], console: Console) -> None:
    """The table, the geometric means and how many points are ahead."""

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    line(f"{comparison.engine} / the best of {', '.join(run.engine for run in baseline)}")
    line(f"{'(above 1x: ahead)':{NAME_WIDTH}}" + "".join(f"{h:>{CELL}}" for _, h, _ in METRICS))
    for point in comparison.points:
        cells = (_cell(point.metrics.get(field)) for field, _, _ in METRICS)
        line(f"{point.point:{NAME_WIDTH}}" + "".join(f"{cell:>{CELL}}" for cell in cells))
    for field, heading, _ in METRICS:
        all_of = [p.metrics[field] for p in comparison.points if field in p.metrics]
        if all_of:
            ahead = sum(one.ratio > 1 for one in all_of)
            ours = geometric_mean([one.ours for one in all_of])
            best = geometric_mean([one.best for one in all_of])
            ratio = geometric_mean([one.ratio for one in all_of])
            line(
                f"{heading}: ahead at {ahead} of {len(all_of)} points; geometric means"
                f" {ours:,.1f} beside {best:,.1f}, {ratio:.3f}x"
            )
    for run in baseline:
        rows, _ = medians(run)
        shared = [p.point for p in comparison.points if p.point in rows]
        if shared:
            mean = geometric_mean([rows[name]["output_throughput"] for name in shared])
            line(f"{run.engine}: {mean:,.1f} tok/s over {len(shared)} of these points")
    for what, names in (("failed", comparison.failed), ("not measured", comparison.missing)):
        if names:
            line(f"{what}: {', '.join(names)}")


def _cell(compared: Compared | None) -> str:
    if compared is None:
        return "-"
    return f"{compared.ours:,.1f} / {compared.best:,.1f} {compared.ratio:6.2f}x"
