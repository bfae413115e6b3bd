"""`cearx bench plot`: result files to a page or a picture, by the ending of the output's name.

Owns nothing; called by `cli.py`.
"""

from collections.abc import Sequence
from pathlib import Path

from cearx.frontend.bench.bench_error import BenchError
from cearx.frontend.bench.chart_page import page
from cearx.frontend.bench.chart_picture import write_picture
from cearx.frontend.bench.charts import chart_rows
from cearx.frontend.bench.results import read_results


def plot(files: Sequence[Path], output: Path) -> None:
    """Raises BenchError."""
    if output.suffix not in (".html", ".png"):
        raise BenchError(f"--output must end in .html or .png, got {output.name!r}")
    rows = chart_rows([run for path in files for run in read_results(path)])
    if output.suffix == ".png":
        write_picture(rows, output)
        return
    try:
        output.write_text(page(rows), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {output}: {error.strerror}") from error
