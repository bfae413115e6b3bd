"""Figures of a run: what each request waited for and got, and what the steps cost.

Pure arithmetic over a timeline, in integers: microseconds of engine time, tokens, blocks; shares in
thousandths. The text for a person is in `stats.py`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from cearx.core.events import FinishReason
from cearx.core.identifiers import RequestId
from cearx.replay.request_line import RequestLine
from cearx.replay.step_parts import first_token_parts, step_parts
from cearx.replay.timeline import Timeline


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Some values at a glance; percentiles are values that occur (nearest rank)."""

    count: int
    mean: int
    p50: int
    p99: int
    max: int


class RequestFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One request; None where it did not get so far, or the log does not hold its beginning."""

    request_id: RequestId
    num_prompt_tokens: int
    num_output_tokens: int
    arrived_us: int
    queue_us: int | None
    """From arrival to the first step it is in."""
    waited_us: int
    """In the queue in all, after preemptions too."""
    ttft_us: int | None
    """From arrival to the end of the step that sampled its first token."""
    itl_p50_us: int | None
    itl_p99_us: int | None
    """Between two of its tokens."""
    total_us: int | None
    """From arrival to its end."""
    num_chunks: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_hit_tokens: int
    stall_us: int
    """Its longest time without a row while it lived."""
    ended: str
    """The reason, `UNFINISHED`, `REFUSED` with the reason, or `LOST` in a gap of the log."""


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    num_requests: int
    ended: dict[str, int]
    duration_us: int
    num_steps: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_computed_tokens: int
    num_recomputed_tokens: int
    num_output_tokens: int
    num_preemptions: int
    output_tokens_per_s: int
    queue_us: Spread | None
    ttft_us: Spread | None
    itl_us: Spread | None
    total_us: Spread | None
    running: Spread | None
    waiting: Spread | None
    budget_fill_permille: Spread | None
    block_occupancy_permille: Spread | None
    execute_us: Spread | None
    """In the worker, a step."""
    schedule_us: Spread | None
    """In the core, a step."""
    step_parts: dict[str, Spread]
    """A step's time, by part, in order; what no note has measured is left out."""
    first_token_parts: dict[str, Spread]
    """Of the time to first token, in order; empty where the notes do not say it."""
    stall_us: int
    """Longest time without a token, an admission or an end while somebody waited or ran."""
    stall_step: int | None
    """The last step planned before it."""


def spread(values: Iterable[int]) -> Spread | None:
    """None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(
        count=len(ordered),
        mean=sum(ordered) // len(ordered),
        p50=percentile(ordered, 50),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def percentile(ordered: Sequence[int], percent: int) -> int:
    """Nearest rank: the least value that `percent` of all do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def token_times(line: RequestLine, timeline: Timeline) -> list[int]:
    """When each output token was there."""
    return [timeline.steps.finished_us[step] for step in line.token_steps]


def waiting_spans(line: RequestLine, timeline: Timeline) -> Iterator[tuple[int, int, bool]]:
    """(from, to, after a preemption) of each stay in the queue."""
    planned = timeline.steps.planned_us
    end = timeline.last_us if line.ended_us is None else line.ended_us
    if line.refused is not None or (line.began_before and not line.admissions):
        return  # the latter ran before the log begins, or nobody knows how long it waited
    starts = [(line.arrived_us, False), *((planned[step], True) for step in line.preemptions)]
    stops = [max(planned[a.step], line.arrived_us) for a in line.admissions]
    for index, (start, again) in enumerate(starts):
        stop = stops[index] if index < len(stops) else end
        yield start, max(start, stop), again


def request_figures(line: RequestLine, timeline: Timeline) -> RequestFigures:
    times = token_times(line, timeline)
    gaps = spread(b - a for a, b in itertools.pairwise(times))
    waits = list(waiting_spans(line, timeline))
    is_whole = not (line.began_before or line.lost)
    ended = "UNFINISHED" if line.ended is None else line.ended.name
    if line.lost:
        ended = "LOST"
    if line.refused is not None:
        ended = f"REFUSED {line.refused.name}"
    return RequestFigures(
        request_id=line.request_id,
        num_prompt_tokens=line.num_prompt_tokens,
        num_output_tokens=len(times),
        arrived_us=line.arrived_us,
        queue_us=waits[0][1] - waits[0][0] if is_whole and waits and line.admissions else None,
        waited_us=sum(stop - start for start, stop, _ in waits),
        ttft_us=times[0] - line.arrived_us if is_whole and times else None,
        itl_p50_us=None if gaps is None else gaps.p50,
        itl_p99_us=None if gaps is None else gaps.p99,
        total_us=line.ended_us - line.arrived_us if is_whole and line.ended_us else None,
        num_chunks=len(line.chunks),
        num_preemptions=len(line.preemptions),
        num_recomputed_tokens=line.num_recomputed_tokens,
        num_hit_tokens=line.num_hit_tokens,
        stall_us=_longest_stall(line, timeline),
        ended=ended,
    )


def _longest_stall(line: RequestLine, timeline: Timeline) -> int:
    finished, planned = timeline.steps.finished_us, timeline.steps.planned_us
    end = timeline.last_us if line.ended_us is None else line.ended_us
    longest, last = 0, line.arrived_us
    worked = sorted({*line.token_steps, *(chunk.step for chunk in line.chunks)})
    for step in worked:
        longest = max(longest, planned[step] - last)
        last = finished[step] or planned[step]
    return max(longest, end - last)


def run_figures(timeline: Timeline, requests: Sequence[RequestFigures]) -> RunFigures:
    steps, config = timeline.steps, timeline.config
    lines = timeline.requests.values()
    accepted = [line for line in lines if line.refused is None]
    ended: dict[str, int] = {}
    for figures in requests:
        ended[figures.ended] = ended.get(figures.ended, 0) + 1
    duration = timeline.last_us - timeline.first_us
    outputs = sum(len(line.token_steps) for line in lines)
    budget, blocks = config.max_num_batched_tokens, config.num_blocks
    stall_us, stall_step = _longest_run_stall(timeline)
    return RunFigures(
        num_requests=len(timeline.requests),
        ended=dict(sorted(ended.items())),
        duration_us=duration,
        num_steps=len(steps),
        num_prompt_tokens=sum(line.num_prompt_tokens for line in accepted),
        num_hit_tokens=sum(line.num_hit_tokens for line in lines),
        num_computed_tokens=sum(line.num_computed_tokens for line in lines),
        num_recomputed_tokens=sum(line.num_recomputed_tokens for line in lines),
        num_output_tokens=outputs,
        num_preemptions=sum(steps.num_preempted),
        output_tokens_per_s=outputs * 1_000_000 // max(duration, 1),
        queue_us=spread(f.queue_us for f in requests if f.queue_us is not None),
        ttft_us=spread(f.ttft_us for f in requests if f.ttft_us is not None),
        itl_us=spread(all_gaps(timeline)),
        total_us=spread(
            f.total_us for f in requests if f.total_us is not None and f.ended in FINISHED
        ),
        running=spread(steps.num_running),
        waiting=spread(steps.num_waiting),
        budget_fill_permille=spread(
            1000 * steps.num_tokens(i) // budget for i in range(len(steps))
        ),
        block_occupancy_permille=spread(1000 * held // blocks for held in steps.num_held),
        execute_us=spread(us for us in steps.execute_us if us),
        schedule_us=spread(us for us in steps.schedule_us if us),
        step_parts=_spreads(step_parts(steps)),
        first_token_parts=_spreads(first_token_parts(timeline)),
        stall_us=stall_us,
        stall_step=stall_step,
    )


def _spreads(columns: dict[str, list[int]]) -> dict[str, Spread]:
    found = ((name, spread(values)) for name, values in columns.items())
    return {name: values for name, values in found if values is not None}


FINISHED = (FinishReason.STOP.name, FinishReason.LENGTH.name)


def all_gaps(timeline: Timeline) -> Iterator[int]:
    """Each time between two tokens of one request."""
    for line in timeline.requests.values():
        times = token_times(line, timeline)
        yield from (b - a for a, b in itertools.pairwise(times))


def _longest_run_stall(timeline: Timeline) -> tuple[int, int | None]:
    """Between two events of progress with somebody there all the time; and the step before it."""
    steps = timeline.steps
    progress = bytearray(len(steps))
    admitting = bytearray(len(steps))
    events: list[tuple[int, int]] = []  # (time, change of the number of requests there)
    for line in timeline.requests.values():
        if line.refused is None:
            events.append((line.arrived_us, 1))
            if line.ended_us is not None:
                events.append((line.ended_us, -1))
            for step in line.token_steps:
                progress[step] = 1
            for admitted in line.admissions:
                admitting[admitted.step] = 1
    events += ((steps.finished_us[i], 0) for i, flag in enumerate(progress) if flag)
    events += ((steps.planned_us[i], 0) for i, flag in enumerate(admitting) if flag)
    events.append((timeline.last_us, 0))
    events.sort()
    longest, begun, present, last = 0, 0, 0, timeline.first_us
    for time, change in events:
        if present and time - last > longest:
            longest, begun = time - last, last
        present += change
        if change <= 0 or present == 1:  # an arrival is no progress for those who are there
            last = time
    before = None
    for index, planned in enumerate(steps.planned_us):
        if longest and planned <= begun:
            before = steps.step_id[index]
    return longest, before
