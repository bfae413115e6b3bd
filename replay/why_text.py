"""The story of one request for a person: a table of spans, then its waits by reason."""

from collections.abc import Sequence

from rich.console import Console

from cearx.core.identifiers import RequestId
from cearx.replay.terminal import duration, table
from cearx.replay.why import BEHIND, Span

MAX_IDS = 6


def print_why(request_id: RequestId, spans: Sequence[Span], console: Console) -> None:
    console.print(f"request {request_id}")
    start = spans[0].from_us
    columns = ["at", "steps", "for", "what", "why, and who instead"]
    made = table(columns, (_cells(span, start) for span in spans))
    for column in made.columns[3:]:
        column.justify = "left"
    console.print(made)
    waits: dict[str, tuple[int, int]] = {}
    for span in spans:
        if span.what == "waits":
            code = span.reason.split(": ")[-1]
            key = f"{code} (of the request before it)" if span.reason.startswith(BEHIND) else code
            steps, us = waits.get(key, (0, 0))
            waits[key] = (steps + span.num_steps, us + span.to_us - span.from_us)
    if waits:
        console.print()
        rows = sorted(waits.items(), key=lambda item: -item[1][1])
        cells = ((key, steps, duration(us)) for key, (steps, us) in rows)
        console.print(table(["waited for", "steps", "time"], cells))


def _cells(span: Span, start_us: int) -> list[object]:
    steps: object = span.first_step
    if span.num_steps > 1:
        steps = f"{span.first_step}-{span.last_step}"
    text = [span.reason] if span.reason else []
    if span.num_tokens:
        text.append(f"{span.num_tokens} tokens computed, {span.num_sampled} sampled")
    if span.admitted:
        text.append(f"let in: {_ids(span.admitted)}")
    if span.preempted:
        text.append(f"put out: {_ids(span.preempted)}")
    at = f"+{duration(span.from_us - start_us)}"
    lasted = duration(span.to_us - span.from_us) if span.to_us > span.from_us else ""
    return [at, steps, lasted, span.what, "; ".join(text)]


def _ids(request_ids: Sequence[RequestId]) -> str:
    shown = ", ".join(map(str, request_ids[:MAX_IDS]))
    more = len(request_ids) - MAX_IDS
    return f"{shown} and {more} more" if more > 0 else shown
