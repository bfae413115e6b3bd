"""Charts as a PNG, drawn by matplotlib where it is installed (the extra `cearx[bench]`).

Owns nothing but the drawing; `chart_page.py` draws the same charts without any dependency. Called
by `plot.py`.
"""

from collections.abc import Sequence
from pathlib import Path

from cearx.frontend.bench.bench_error import BenchError
from cearx.frontend.bench.charts import ChartRow, engines

INCHES = (3.6, 2.6)
DOTS_PER_INCH = 110


def write_picture(rows: Sequence[ChartRow], path: Path) -> None:
    """Raises BenchError without matplotlib, and when the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError(
            "a .png needs matplotlib: pip install 'cearx[bench]', or write a .html"
        ) from error
    columns = max(len(row.charts) for row in rows)
    size = (INCHES[0] * columns, INCHES[1] * len(rows))
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    color = {name: f"C{index}" for index, name in enumerate(engines(rows))}
    all_axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, axes_of_row in zip(rows, all_axes, strict=True):
        for axes in axes_of_row[len(row.charts) :]:
            axes.set_axis_off()
        for chart, axes in zip(row.charts, axes_of_row, strict=False):
            for series in chart.series:
                loads, values = zip(*series.points, strict=True)
                axes.plot(loads, values, "o-", color=color[series.engine], label=series.engine)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_ylim(bottom=0)
            axes.set_xlabel(chart.x_label, fontsize=7)
            axes.set_title(f"{row.title}\n{chart.title}", fontsize=7)
            axes.tick_params(labelsize=7)
            axes.grid(alpha=0.3)
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error
