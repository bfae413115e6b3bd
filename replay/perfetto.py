"""`cearx replay export --perfetto`: trace events for ui.perfetto.dev and chrome://tracing.

Owns the layout: a track for the steps, one for each batch slot (the lowest free one is taken at
admission), an async track for each request with its states, and counters. Times are microseconds
of engine time from the start of the log. Decodes of a request in a row are one event.
"""

import heapq
import json
from collections.abc import Iterator

import msgspec

from cearx.core.events import WaitReason
from cearx.core.identifiers import RequestId
from cearx.replay.figures import waiting_spans
from cearx.replay.request_line import Chunk, RequestLine
from cearx.replay.timeline import Timeline

PID = 1
STEPS_TID = 1
FIRST_SLOT_TID = 10


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch slot does from one time to another."""

    slot: int
    request_id: RequestId
    kind: str
    """`prefill` or `decode`."""
    from_us: int
    to_us: int
    first_step: int
    """Indices in the table of steps."""
    last_step: int
    num_tokens: int


def slices(timeline: Timeline) -> Iterator[Slice]:
    """All work of all requests, by request; a slot is never used by two at a time."""
    slots = slots_of(timeline)
    for line in timeline.requests.values():
        for stay, slot in enumerate(slots.get(line.request_id, ())):
            first = line.admissions[stay].step
            last = line.preemptions[stay] if stay < len(line.preemptions) else None
            yield from _work(line, timeline, slot, first, last)


def _work(
    line: RequestLine, timeline: Timeline, slot: int, first: int, end: int | None
) -> Iterator[Slice]:
    """Chunks one by one, then the decodes of steps [first, end) as one."""

    def in_stay(step: int) -> bool:
        return step >= first and (end is None or step < end)

    chunks = [chunk for chunk in line.chunks if in_stay(chunk.step)]
    for chunk in chunks:
        yield _slice(line, timeline, slot, "prefill", chunk.step, chunk.step, chunk.num_tokens)
    sampled_by_chunk = {chunk.step for chunk in chunks}
    decodes = [s for s in line.token_steps if in_stay(s) and s not in sampled_by_chunk]
    run: list[int] = []
    for step in decodes:
        if run and step != run[-1] + 1:
            yield _slice(line, timeline, slot, "decode", run[0], run[-1], len(run))
            run = []
        run.append(step)
    if run:
        yield _slice(line, timeline, slot, "decode", run[0], run[-1], len(run))


def _slice(
    line: RequestLine, timeline: Timeline, slot: int, kind: str, first: int, last: int, tokens: int
) -> Slice:
    steps = timeline.steps
    return Slice(
        slot=slot,
        request_id=line.request_id,
        kind=kind,
        from_us=steps.planned_us[first],
        to_us=max(steps.finished_us[last], steps.planned_us[last]),
        first_step=first,
        last_step=last,
        num_tokens=tokens,
    )


def slots_of(timeline: Timeline) -> dict[RequestId, list[int]]:
    """The batch slot of each stay in the running set: the lowest that is free."""
    events: list[tuple[int, int, RequestId]] = []  # (step, 0 leaves or 1 enters, who)
    for line in timeline.requests.values():
        for stay, admitted in enumerate(line.admissions):
            events.append((admitted.step, 1, line.request_id))
            if stay < len(line.preemptions):
                events.append((line.preemptions[stay], 0, line.request_id))
            elif line.ended is not None or line.lost:
                events.append((_leaves(line), 0, line.request_id))
    events.sort()
    free: list[int] = []
    held: dict[RequestId, int] = {}
    slots: dict[RequestId, list[int]] = {}
    count = 0
    for _, enters, request_id in events:
        if not enters:
            slot = held.pop(request_id, None)
            if slot is not None:
                heapq.heappush(free, slot)
            continue
        if free:
            slot = heapq.heappop(free)
        else:
            slot, count = count, count + 1
        held[request_id] = slot
        slots.setdefault(request_id, []).append(slot)
    return slots


def _leaves(line: RequestLine) -> int:
    """The first step that it cannot be in any more."""
    last = max(
        line.admissions[-1].step,
        line.token_steps[-1] if line.token_steps else 0,
        line.chunks[-1].step if line.chunks else 0,
    )
    return last + 1


def events(
    timeline: Timeline, first_step: int | None = None, last_step: int | None = None
) -> Iterator[dict[str, object]]:
    """Trace events of the steps in the window, whole slices only."""
    steps = timeline.steps
    if not len(steps):
        return
    from_us = 0 if first_step is None else _time_of(timeline, first_step)
    to_us = timeline.last_us if last_step is None else _time_of(timeline, last_step + 1)
    start = timeline.first_us

    def seen(begin: int, end: int) -> bool:
        return end >= from_us and begin <= to_us

    yield from _names(timeline)
    for index in range(len(steps)):
        if seen(steps.planned_us[index], steps.finished_us[index] or steps.planned_us[index]):
            yield from _step_events(timeline, index, start)
    for piece in slices(timeline):
        if seen(piece.from_us, piece.to_us):
            yield {
                "ph": "X",
                "pid": PID,
                "tid": FIRST_SLOT_TID + piece.slot,
                "ts": piece.from_us - start,
                "dur": piece.to_us - piece.from_us,
                "name": f"{piece.kind} {piece.request_id}",
                "cat": piece.kind,
                "args": {
                    "request": piece.request_id,
                    "first_step": steps.step_id[piece.first_step],
                    "last_step": steps.step_id[piece.last_step],
                    "tokens": piece.num_tokens,
                },
            }
    for line in timeline.requests.values():
        for name, begin, end in states(line, timeline):
            if seen(begin, end):
                common = {"pid": PID, "tid": 0, "cat": "request", "id": line.request_id}
                yield {**common, "ph": "b", "ts": begin - start, "name": name}
                yield {**common, "ph": "e", "ts": end - start, "name": name}


def _time_of(timeline: Timeline, step_id: int) -> int:
    index = step_id - timeline.steps.step_id[0]
    if index >= len(timeline.steps):
        return timeline.last_us
    return timeline.steps.planned_us[max(0, index)]


def states(line: RequestLine, timeline: Timeline) -> Iterator[tuple[str, int, int]]:
    """(state, from, to): queued, prefill, decode, preempted, without a gap, in order."""
    planned, finished = timeline.steps.planned_us, timeline.steps.finished_us
    end = timeline.last_us if line.ended_us is None else line.ended_us
    for stay, (begin, stop, again) in enumerate(waiting_spans(line, timeline)):
        yield ("preempted" if again else "queued", begin, stop)
        if stay >= len(line.admissions):
            return
        first = line.admissions[stay].step
        is_last = stay >= len(line.preemptions)
        leaves = end if is_last else planned[line.preemptions[stay]]
        last = None if is_last else line.preemptions[stay]
        chunk = _sampling_chunk(line, first, last)
        prefilled = leaves if chunk is None else min(finished[chunk.step] or leaves, leaves)
        yield ("prefill", stop, max(stop, prefilled))
        if prefilled < leaves:
            yield ("decode", prefilled, leaves)


def _sampling_chunk(line: RequestLine, first: int, end: int | None) -> Chunk | None:
    for chunk in line.chunks:
        if chunk.samples and chunk.step >= first and (end is None or chunk.step < end):
            return chunk
    return None


def _names(timeline: Timeline) -> Iterator[dict[str, object]]:
    num_slots = 1 + max((max(s) for s in slots_of(timeline).values()), default=0)
    tracks = {STEPS_TID: "steps"}
    tracks |= {FIRST_SLOT_TID + slot: f"slot {slot}" for slot in range(num_slots)}
    yield {"ph": "M", "pid": PID, "name": "process_name", "args": {"name": "engine"}}
    for tid, name in tracks.items():
        common = {"ph": "M", "pid": PID, "tid": tid}
        yield {**common, "name": "thread_name", "args": {"name": name}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _step_events(timeline: Timeline, index: int, start: int) -> Iterator[dict[str, object]]:
    steps, at = timeline.steps, timeline.steps.planned_us[index] - start
    args: dict[str, object] = {
        "decodes": steps.num_decodes[index],
        "prefill_tokens": steps.num_prefill_tokens[index],
        "preempted": steps.num_preempted[index],
        "schedule_us": steps.schedule_us[index],
    }
    if steps.head_id[index] >= 0:
        reason = WaitReason(steps.head_reason[index]).name
        args["head_waits"] = f"{steps.head_id[index]} {reason}"
    yield {
        "ph": "X",
        "pid": PID,
        "tid": STEPS_TID,
        "ts": at,
        "dur": max(0, steps.finished_us[index] - steps.planned_us[index]),
        "name": f"step {steps.step_id[index]}",
        "cat": "step",
        "args": args,
    }
    counters = {
        "free blocks": timeline.config.num_blocks - steps.num_held[index],
        "running": steps.num_running[index],
        "waiting": steps.num_waiting[index],
        "budget used": steps.num_tokens(index),
    }
    for name, value in counters.items():
        yield {"ph": "C", "pid": PID, "ts": at, "name": name, "args": {"value": value}}


def document(
    timeline: Timeline, first_step: int | None = None, last_step: int | None = None
) -> Iterator[str]:
    """The JSON file in pieces."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    separator = ""
    for event in events(timeline, first_step, last_step):
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"
    yield "\n]}\n"
