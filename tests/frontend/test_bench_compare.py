"""`cearx bench compare` and `plot`: ratios, geometric means, and what a picture must hold."""

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cearx.frontend.bench.chart_page import nice_ceiling
from cearx.frontend.bench.cli import main
from cearx.frontend.bench.compare import compare
from cearx.frontend.bench.results import BenchRun, read_results, write_results


def point(concurrency: int, rate: float, ttft: float, status: str = "ok") -> dict[str, Any]:
    return {
        "concurrency": concurrency,
        "input_len": 32,
        "output_len": 256,
        "status": status,
        "output_throughput": rate,
        "median_ttft_ms": ttft,
    }


FAST = BenchRun(
    engine="fast",
    model="Org/Some-1.5B",
    kind="matrix",
    points=[point(1, 100, 20), point(4, 300, 50)],
)
PROMPT = BenchRun(
    engine="prompt",
    model="Some-1.5B",
    kind="matrix",
    points=[point(1, 90, 10), point(4, 310, 40), point(16, 900, 90)],
)
OTHER = BenchRun(engine="fast", model="Other", kind="matrix", points=[point(1, 1, 1)])


def ours(*points: dict[str, Any]) -> BenchRun:
    return BenchRun(engine="ours", model="some_1.5b", kind="matrix", points=list(points))


def test_each_metric_meets_its_best_opponent() -> None:
    """Throughput against the highest, times against the lowest; above 1 is ahead in both."""
    result = compare([FAST, PROMPT], ours(point(1, 150, 8), point(4, 155, 80)))
    first, second = result.points
    assert first.metrics["output_throughput"].engine == "fast"
    assert first.metrics["output_throughput"].ratio == pytest.approx(1.5)
    assert first.metrics["median_ttft_ms"].engine == "prompt"
    assert first.metrics["median_ttft_ms"].ratio == pytest.approx(1.25)
    assert second.metrics["output_throughput"].ratio == pytest.approx(0.5)
    assert second.metrics["median_ttft_ms"].ratio == pytest.approx(0.5)
    assert result.missing == ["C16/I32/O256"]
    assert "median_tpot_ms" not in first.metrics


def test_repeats_count_by_their_median_and_failures_not_at_all() -> None:
    """Three repeats make one ratio; a point with a failed repeat is named and has none."""
    repeats = [point(1, rate, 10) for rate in (50, 200, 120)]
    result = compare([FAST], ours(*repeats, point(4, 600, 1), point(4, 0, 1, "failed")))
    (only,) = result.points
    assert only.metrics["output_throughput"].ours == 120
    assert result.failed == ["C4/I32/O256"]


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Models are found by name, geometric means are printed, failures set the exit code."""
    baseline, mine = tmp_path / "baseline.json", tmp_path / "mine.json"
    write_results(baseline, [FAST, PROMPT, OTHER])
    write_results(mine, [ours(point(1, 200, 8), point(4, 310, 80))])
    assert main(["compare", str(baseline), str(mine)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "C1/I32/O256 200.0 / 100.0 2.00x 8.0 / 10.0 1.25x" in printed
    assert f"{math.sqrt(200 * 310):,.1f} beside {math.sqrt(100 * 310):,.1f}, 1.414x" in printed
    assert "ahead at 1 of 2" in printed
    assert f"prompt: {math.sqrt(90 * 310):,.1f} tok/s over 2" in printed
    write_results(mine, [ours(point(1, 200, 8, "failed"), point(4, 310, 80))])
    assert main(["compare", str(baseline), str(mine)]) == 1
    assert "failed: C1/I32/O256" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"format": "cearx-bench-9", "runs": []}', "has the format 'cearx-bench-9'"),
        ('{"runs": 7}', "is no result file"),
        ("", "is no result file"),
        ('{"format": "cearx-bench-1", "runs": []}', "it has none"),
    ],
)
def test_other_files_are_refused(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason is named, and so is a model that the baseline does not have."""
    mine, bad = tmp_path / "mine.json", tmp_path / "bad.json"
    write_results(mine, [FAST])
    bad.write_text(content)
    assert main(["compare", str(bad), str(mine)]) == 2
    assert words in capsys.readouterr().err


def test_the_page_draws_every_point(tmp_path: Path) -> None:
    """One dot a point, chart and engine, in the frame, higher values higher; nothing to load."""
    file, page = tmp_path / "r.json", tmp_path / "r.html"
    failed = point(8, 1, 1, "failed")
    run = ours(point(1, 150, 8), point(4, 155, 80), failed)
    write_results(file, [FAST, PROMPT, run])
    assert main(["plot", str(file), "--output", str(page)]) == 0
    text = page.read_text()
    assert not re.search(r"https?://|<script|<link|@import", text)
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text)]
    assert len(charts) == 2  # throughput and TTFT: the rows have nothing else
    for chart in charts:
        dots = chart.findall("circle")
        assert len(dots) == 2 + 3 + 2
        assert all(56 <= float(dot.attrib["cx"]) <= 288 for dot in dots)
        assert all(24 <= float(dot.attrib["cy"]) <= 166 for dot in dots)
    height = {dot[0].text: float(dot.attrib["cy"]) for dot in charts[0].findall("circle")}
    assert height["prompt: 900 at 16 streams"] < height["prompt: 310 at 4 streams"]
    assert height["fast: 100 at 1 streams"] > height["ours: 150 at 1 streams"]


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A PNG where matplotlib is installed; else the words say how to get one."""
    file, picture = tmp_path / "r.json", tmp_path / "r.png"
    write_results(file, [FAST, PROMPT])
    code = main(["plot", str(file), "--output", str(picture)])
    if code == 2:
        assert "cearx[bench]" in capsys.readouterr().err
        assert not picture.exists()
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert int.from_bytes(picture.read_bytes()[16:20], "big") > 400


def test_plots_without_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to draw, and an ending that nobody draws, are errors."""
    file = tmp_path / "r.json"
    write_results(file, [ours(point(1, 1, 1, "failed"))])
    assert main(["plot", str(file), "--output", str(tmp_path / "r.html")]) == 2
    assert "no complete point" in capsys.readouterr().err
    assert main(["plot", str(file), "--output", str(tmp_path / "r.svg")]) == 2
    assert "'r.svg'" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "ceiling"), [(0, 1), (0.9, 1), (1.01, 2), (84, 100), (401, 500)])
def test_ceilings(value: float, ceiling: float) -> None:
    """An axis ends on a round number at or above its largest value."""
    assert nice_ceiling(value) == pytest.approx(ceiling)


def test_results_are_read_as_written(tmp_path: Path) -> None:
    """The format's round trip."""
    path = tmp_path / "deep" / "r.json"
    write_results(path, [FAST, OTHER])
    assert read_results(path) == [FAST, OTHER]
