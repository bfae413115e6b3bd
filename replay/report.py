"""`cearx replay report`: one HTML page with everything in it, for a person to look at.

Owns what is embedded: columns of integers, times in microseconds from the start of the log. The
page itself is `report_page.html` with its style and scripts; it loads nothing from anywhere, and
text from a trace reaches it as JSON only, never as markup.
"""

import itertools
from array import array
from collections.abc import Iterable, Iterator
from importlib.resources import files

import msgspec

from cearx.core.events import WaitReason
from cearx.replay.figures import RequestFigures, request_figures, run_figures
from cearx.replay.perfetto import slices, states
from cearx.replay.timeline import Timeline, timeline_of
from cearx.replay.trace import Trace

STATES = ("queued", "prefill", "decode", "preempted")
SCRIPTS = ("report_data.js", "report_draw.js", "report_page.js")


def report(trace: Trace, title: str) -> Iterator[str]:
    """The page in pieces; reads the whole trace first."""
    timeline = timeline_of(trace.header.config, trace.records())
    data = page_data(timeline, trace.header.code_version, title)
    style = _page_file("report_page.css")
    scripts = "\n".join(map(_page_file, SCRIPTS))
    before, between, after = _page_file("report_page.html").split("<!-- part -->")
    yield from (before, "<style>\n", style, "</style>\n", between)
    yield '<script type="application/json" id="data">'
    yield embedded(data)
    yield "</script>\n<script>\n"
    yield from (scripts, "</script>\n", after)


def embedded(data: object) -> str:
    """JSON that cannot end its script element, nor begin a comment in it."""
    text = msgspec.json.encode(data).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _page_file(name: str) -> str:
    return files("cearx.replay").joinpath(name).read_text(encoding="utf-8")


def page_data(timeline: Timeline, code_version: str, title: str) -> dict[str, object]:
    """What the scripts read; columns that change slowly are differences."""
    lines = timeline.requests.values()
    figures = [request_figures(line, timeline) for line in lines]
    steps = timeline.steps
    return {
        "title": title,
        "codeVersion": code_version,
        "config": msgspec.structs.asdict(timeline.config),
        "run": run_figures(timeline, figures),
        "durationUs": timeline.last_us - timeline.first_us,
        "states": STATES,
        "reasons": {reason.value: reason.name for reason in WaitReason},
        "steps": {
            "firstId": steps.step_id[0] if len(steps) else 0,
            "plannedDelta": _differences(steps.planned_us, timeline.first_us),
            "length": [
                max(0, finished - planned)
                for planned, finished in zip(steps.planned_us, steps.finished_us, strict=True)
            ],
            "decodes": list(steps.num_decodes),
            "prefill": list(steps.num_prefill_tokens),
            "runningDelta": _differences(steps.num_running),
            "waitingDelta": _differences(steps.num_waiting),
            "heldDelta": _differences(steps.num_held),
            "preempted": _sparse(steps.num_preempted),
            "heads": _runs(zip(steps.head_id, steps.head_reason, strict=True)),
        },
        "requests": _requests(timeline, figures),
    }


def _requests(timeline: Timeline, figures: list[RequestFigures]) -> list[list[object]]:
    """One list a request, in the order that `report_data.js` names."""
    start = timeline.first_us
    work: dict[int, list[int]] = {}
    for piece in slices(timeline):
        work.setdefault(piece.request_id, []).extend(
            (
                piece.slot,
                STATES.index(piece.kind),
                piece.from_us - start,
                piece.to_us - piece.from_us,
                piece.first_step,
                piece.last_step - piece.first_step,
                piece.num_tokens,
            )
        )
    found: list[list[object]] = []
    for line, f in zip(timeline.requests.values(), figures, strict=True):
        spans = [
            (STATES.index(n), begin - start, end - begin)
            for n, begin, end in states(line, timeline)
        ]
        found.append(
            [
                line.request_id,
                line.arrived_us - start,
                line.arrived_step,
                line.num_prompt_tokens,
                line.max_tokens,
                f.num_output_tokens,
                f.num_hit_tokens,
                f.num_recomputed_tokens,
                f.queue_us,
                f.waited_us,
                f.ttft_us,
                f.itl_p50_us,
                f.itl_p99_us,
                f.total_us,
                f.stall_us,
                f.ended,
                list(itertools.chain.from_iterable(spans)),
                work.get(line.request_id, []),
                [part for a in line.admissions for part in (a.step, a.num_cached_tokens)],
                line.preemptions,
                [p for w in line.waits for p in (w.first_step, w.last_step, w.reason.value)],
            ]
        )
    return found


def _differences(values: "array[int]", start: int = 0) -> list[int]:
    return [b - a for a, b in itertools.pairwise(itertools.chain((start,), values))]


def _sparse(values: Iterable[int]) -> list[int]:
    """Position and value of those that are not 0."""
    return [part for i, value in enumerate(values) if value for part in (i, value)]


def _runs(values: Iterable[tuple[int, int]]) -> list[int]:
    """(how many, first, second) of equal pairs in a row."""
    return [
        part for pair, group in itertools.groupby(values) for part in (sum(1 for _ in group), *pair)
    ]
