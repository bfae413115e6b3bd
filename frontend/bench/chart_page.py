"""Charts as one HTML page: inline SVG, no script, nothing to load.

Owns the drawing. Loads are on a logarithmic axis, values from zero; a point's numbers show when the
mouse rests on it. Called by `plot.py`.
"""

import math
from collections.abc import Sequence
from html import escape

from cearx.frontend.bench.charts import Chart, ChartRow, engines

WIDTH, HEIGHT = 300, 200
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 24, 34
COLORS = ("#1b6ac9", "#d1611a", "#2b8a3e", "#8a3ab9", "#b3123f", "#5f6368")
NUM_TICKS = 4
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 24px; color: #1d2430; background: #fff; }
h1 { font-size: 20px; } h2 { font-size: 15px; margin: 24px 0 4px; }
.row { display: flex; flex-wrap: wrap; gap: 8px; }
.legend span { margin-right: 18px; } .legend i { display: inline-block; width: 18px; height: 3px;
  vertical-align: middle; margin-right: 6px; }
svg text { font-size: 11px; fill: #4a5361; } svg .title { font-weight: 600; fill: #1d2430; }
svg .grid { stroke: #e3e7ed; } svg .axis { stroke: #9aa3af; }
"""


def page(rows: Sequence[ChartRow]) -> str:
    """The whole document."""
    color = {name: COLORS[index % len(COLORS)] for index, name in enumerate(engines(rows))}
    legend = "".join(
        f'<span><i style="background:{shade}"></i>{escape(name)}</span>'
        for name, shade in color.items()
    )
    body = "".join(
        f'<h2>{escape(row.title)}</h2><div class="row">'
        + "".join(draw(chart, color) for chart in row.charts)
        + "</div>"
        for row in rows
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Latency against load</title><style>{STYLE}</style>"
        f'<h1>Latency against load</h1><p class="legend">{legend}</p>{body}</html>\n'
    )


def draw(chart: Chart, color: dict[str, str]) -> str:
    """One chart as an SVG element."""
    loads = sorted({x for series in chart.series for x, _ in series.points})
    top = nice_ceiling(max(y for series in chart.series for _, y in series.points))

    def x_of(load: float) -> float:
        low, high = math.log(loads[0]), math.log(loads[-1])
        share = (math.log(load) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT}" y="14">{escape(chart.title)}</text>']
    for tick in range(NUM_TICKS + 1):
        value = top * tick / NUM_TICKS
        y = y_of(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>'
        )
    for load in thinned(loads):
        parts.append(
            f'<text x="{x_of(load):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">'
            f"{load:.4g}</text>"
        )
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(chart.x_label)}</text>"
    )
    for series in chart.series:
        shade = color[series.engine]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in series.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{shade}" stroke-width="2"/>')
        for x, y in series.points:
            words = escape(f"{series.engine}: {number(y)} at {x:.4g} {chart.x_label}")
            parts.append(
                f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3.5" fill="{shade}">'
                f"<title>{words}</title></circle>"
            )
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def nice_ceiling(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 times a power of ten: its fourths are short numbers."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    for step in (1, 2, 4, 5, 8, 10):
        if value <= step * power:
            return step * power
    return 10 * power


def thinned(loads: Sequence[float]) -> list[float]:
    """At most six labels, the ends among them."""
    if len(loads) <= 6:
        return list(loads)
    return [loads[round(index * (len(loads) - 1) / 5)] for index in range(6)]
