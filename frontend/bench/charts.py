"""Latency against load, as data for a page or a picture.

Owns which rows make which chart: for bursts one row of charts for each shape (prompt and output
length) over the concurrency, for rates over the requests a second that were reached. Never draws.
Called by `plot.py`.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from cearx.frontend.bench.bench_error import BenchError
from cearx.frontend.bench.compare import plain
from cearx.frontend.bench.results import BenchRun

CHARTS = (
    ("output_throughput", "output tokens a second"),
    ("median_ttft_ms", "TTFT, median, ms"),
    ("median_tpot_ms", "TPOT, median, ms"),
    ("p99_itl_ms", "ITL, 99th percentile, ms"),
)


class Series(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    points: list[tuple[float, float]]
    """(load, median of its repeats), by load."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    x_label: str
    series: list[Series]


class ChartRow(msgspec.Struct, frozen=True, kw_only=True):
    """Charts that share their load."""

    title: str
    charts: list[Chart]


def chart_rows(runs: Sequence[BenchRun]) -> list[ChartRow]:
    """Raises BenchError when there is nothing to draw."""
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    names: dict[str, str] = {}
    for run in runs:
        model = names.setdefault(plain(run.model), run.model)  # one name for all spellings
        for row in run.points:
            if row.get("status", "ok") == "ok":
                group = groups.setdefault(_group(model, row), {})
                group.setdefault(run.engine, []).append(row)
    rows = [
        ChartRow(title=title, charts=_charts(by_engine, x_label))
        for (title, x_label), by_engine in groups.items()
    ]
    rows = [row for row in rows if row.charts]
    if not rows:
        raise BenchError("the files hold no complete point to draw")
    return rows


def engines(rows: Sequence[ChartRow]) -> list[str]:
    """Every engine once, in the order in which they appear."""
    names = [s.engine for row in rows for chart in row.charts for s in chart.series]
    return list(dict.fromkeys(names))


def _group(model: str, row: dict[str, Any]) -> tuple[str, str]:
    """The heading of a row of charts, and the name of its load."""
    if "concurrency" in row:
        shape = f"{row['input_len']} prompt, {row['output_len']} output tokens"
        return f"{model}: {shape}", "streams"
    return f"{model}: requests at a rate", "requests a second"


def _charts(by_engine: dict[str, list[dict[str, Any]]], x_label: str) -> list[Chart]:
    charts = []
    for field, title in CHARTS:
        series = []
        for engine, rows in by_engine.items():
            values: dict[float, list[float]] = {}
            for row in rows:
                if row.get(field) is not None:
                    load = float(row.get("concurrency") or row["request_throughput"])
                    values.setdefault(load, []).append(float(row[field]))
            if values:
                points = [(load, statistics.median(values[load])) for load in sorted(values)]
                series.append(Series(engine=engine, points=points))
        if series:
            charts.append(Chart(title=title, x_label=x_label, series=series))
    return charts
