"""The report: self-contained, safe whatever the trace says, and right about every wait."""

import html
import json
import re
from pathlib import Path

import pytest
from chromium import CHROMIUM, run_chromium
from trace_samples import write_run

from cearx.replay import cli
from cearx.replay.figures import request_figures
from cearx.replay.report import embedded, report
from cearx.replay.timeline import Timeline, timeline_of
from cearx.replay.trace import Trace
from cearx.replay.why import BEHIND, explain

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
TIMES = "\u00d7"
HOSTILE = '</script><img src=x onerror="document.title=1">&lt;b&gt;\u2028<!--'


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("report"), 400, seed=4)


def page(path: Path, title: str = "a run") -> str:
    return "".join(report(Trace.open(path), title))


def timeline_at(path: Path) -> Timeline:
    trace = Trace.open(path)
    return timeline_of(trace.header.config, trace.records())


def test_nothing_is_loaded_from_anywhere(path: Path) -> None:
    """No address, no import, no link; and the page forbids itself what it does not need."""
    text = page(path)
    for word in ("http:", "https:", "src=", "@import", "url(", "<link", "fetch(", "innerHTML"):
        assert word not in text, word
    assert "default-src 'none'" in text
    assert "eval" not in text.replace("interval", "")


def test_a_title_cannot_become_markup(path: Path) -> None:
    """Whatever a name holds, it stays within its JSON."""
    text = page(path, HOSTILE)
    assert "<img" not in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert data is not None
    assert json.loads(data[1])["title"] == HOSTILE
    assert json.loads(embedded({"a": HOSTILE})) == {"a": HOSTILE}


def test_the_command(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Writes the file and says how large it is."""
    out = tmp_path / "page.html"
    assert cli.main(["report", str(path), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}, {out.stat().st_size} bytes\n"
    assert out.read_text() == page(path, path.name)


def probe(
    path: Path, folder: Path, script: str, title: str = "a run", fragment: str = ""
) -> object:
    """Opens the report, runs a script in it, answers the JSON that it leaves behind."""
    file = folder / "probed.html"
    text = page(path, title)
    hook = f"<script>try {{ const answer = (() => {{ {script} }})(); "
    hook += "document.documentElement.dataset.answer = JSON.stringify(answer); } "
    hook += "catch (error) { document.documentElement.dataset.answer = "
    hook += "JSON.stringify({error: String(error)}); }</script></body>"
    file.write_text(text.replace("</body>", hook))
    document = run_chromium(file, "--dump-dom", fragment=fragment)
    found = re.search(r'data-answer="([^"]*)"', document)
    assert found is not None, document[:500]
    assert 'data-ready="yes"' in document, "the page's own script failed"
    answer: object = json.loads(html.unescape(found[1]))
    assert not (isinstance(answer, dict) and "error" in answer), answer
    return answer


@needs_chromium
def test_a_hostile_title_is_shown_as_text(path: Path, tmp_path: Path) -> None:
    """The browser makes no element of it and runs nothing."""
    script = "return [document.querySelectorAll('img').length, document.title, data.title]"
    images, title, shown = probe(path, tmp_path, script, HOSTILE)  # type: ignore[misc]
    assert images == 0
    assert shown == HOSTILE
    assert title != "1"


@needs_chromium
def test_waits_are_those_of_why(path: Path, tmp_path: Path) -> None:
    """For every request: the steps that it waited for each reason, as `why` counts them."""
    script = """
      const waits = (r) => waitedFor(r).map((w) => [w.name, w.behind, w.steps]);
      return requests.map((r) => [r.id, waits(r)]);
    """
    answer = probe(path, tmp_path, script)
    trace = Trace.open(path)
    records = list(trace.records())
    assert isinstance(answer, list) and len(answer) == len(timeline_at(path).requests)
    for request_id, waits in answer:
        expected: dict[tuple[str, bool], int] = {}
        for span in explain(trace.header.config, records, request_id):
            if span.what == "waits":
                behind = span.reason.startswith(BEHIND)
                key = (span.reason.split(": ")[-1], behind)
                expected[key] = expected.get(key, 0) + span.num_steps
        queued = {(name, behind): steps for name, behind, steps in waits}
        for (name, behind), steps in expected.items():
            if behind:
                assert queued.get((name, behind)) == steps, (request_id, name, expected, queued)
            else:  # one that runs may wait too, which is no stay in the queue
                assert queued.get((name, behind), 0) <= steps, (request_id, name, expected, queued)
        assert queued.keys() <= expected.keys()


@needs_chromium
def test_the_preempted_request_is_found_first(path: Path, tmp_path: Path) -> None:
    """It heads the list and the findings; its page says when, why and how long it waited."""
    script = """
      const first = document.querySelector('#findings button');
      const item = document.querySelector('.item');
      const texts = [first.textContent, item.textContent];
      item.click();
      return [...texts, document.getElementById('detail').textContent, location.hash,
        document.getElementById('detail').hidden];
    """
    finding, item, detail, fragment, hidden = probe(path, tmp_path, script)  # type: ignore[misc]
    timeline = timeline_at(path)
    worst = max(
        (request_figures(line, timeline) for line in timeline.requests.values()),
        key=lambda f: (f.num_preemptions, f.waited_us),
    )
    assert worst.num_preemptions > 0
    assert finding.startswith(
        f"request {worst.request_id} was preempted {worst.num_preemptions} {TIMES}"
    )
    assert item.startswith(str(worst.request_id)) and f"{worst.num_preemptions} {TIMES}" in item
    assert not hidden
    assert fragment == f"#request={worst.request_id}"
    line = timeline.requests[worst.request_id]
    step = timeline.steps.step_id[line.preemptions[0]]
    assert f"It was preempted {'once' if worst.num_preemptions == 1 else ''}" in detail
    assert re.search(rf"\(steps? {step}\b", detail)
    assert "1 token" in detail and "ended: " in detail, "the explanation breaks off"
    assert "NO_BLOCKS" in detail or "AFTER_PREEMPTION" in detail


@needs_chromium
@pytest.mark.parametrize("view", ["requests", "rows"])
def test_what_is_drawn_is_under_the_mouse(path: Path, view: str, tmp_path: Path) -> None:
    """Both views paint all states in their colours, and a point belongs to who is painted there."""
    script = """
      setTheme(false); draw();
      const { width, height } = canvas, bytes = pen.getImageData(0, 0, width, height).data;
      const at = (x, y) => bytes.slice(4 * (y * width + x), 4 * (y * width + x) + 3).join();
      const seen = new Set(), wrong = [];
      let count = 0;
      const part = (hex, i) => parseInt(hex.slice(i, i + 2), 16);
      const names = colors.states.map((hex) => [1, 3, 5].map((i) => part(hex, i)).join());
      for (let y = AXIS + 1; y < lanesBottom(); y++) {
        for (let x = LEFT + 1; x < size().width - 10; x += 2) {
          const kind = names.indexOf(at(x, y));
          if (kind < 0) continue;
          seen.add(kind);
          count++;
          if (!requestAt(x, y)) wrong.push([x, y, kind]);
        }
      }
      return [[...seen].sort(), wrong.length / count, view.bySlot];
    """
    seen, wrong, by_slot = probe(  # type: ignore[misc]
        path, tmp_path, script, fragment=f"#theme=light&view={view}"
    )
    assert by_slot == (view == "rows")
    assert seen == ([1, 2, 3] if by_slot else [0, 1, 2, 3])
    assert wrong < 0.02  # marks of preemptions stand out a pixel or two


@needs_chromium
def test_moving_about(path: Path, tmp_path: Path) -> None:
    """Zoom keeps the time under the mouse; moving stays within the run; search finds by number."""
    script = """
      draw();
      const before = usOf(400); zoom(0.25, 400);
      const kept = Math.abs(usOf(400) - before) < 1;
      const width = view.to - view.from;
      show(view.from + 1e12, view.to + 1e12);
      const within = view.from <= data.durationUs && Math.abs(view.to - view.from - width) < 1;
      fit();
      const whole = view.from <= 0 && view.to >= data.durationUs;
      const box = document.getElementById('search');
      box.value = '29'; box.dispatchEvent(new Event('input'));
      const numbers = document.querySelectorAll('.item span:first-child');
      const items = [...numbers].map((e) => e.textContent);
      document.dispatchEvent(new KeyboardEvent('keydown', {key: '+'}));
      return [kept, within, whole, items];
    """
    kept, within, whole, items = probe(path, tmp_path, script)  # type: ignore[misc]
    assert kept and within and whole
    assert items and all(item.startswith("29") for item in items)


@needs_chromium
def test_an_empty_log_has_a_page(tmp_path: Path) -> None:
    """No request, no step: the page still opens and says so."""
    empty = write_run(tmp_path, 0, seed=1)
    answer = probe(
        empty, tmp_path, "draw(); return document.getElementById('findings').textContent"
    )
    assert "no request in this log" in str(answer)
