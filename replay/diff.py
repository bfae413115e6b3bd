"""`cearx replay diff A B`: the first decision that differs, and what it did to each request.

Owns the alignment, by order of arrival, and the comparison. Block numbers are left out of it: which
block is taken is no policy. Reads each trace once, both side by side.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    Admission,
    BlocksGranted,
    Decision,
    PrefillChunk,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    RequestWaits,
    StepPlan,
)
from cearx.core.identifiers import BlockId, RequestId, StepId
from cearx.core.trace_format import TraceDamaged, TraceIncompatible
from cearx.replay.figures import RequestFigures, RunFigures, request_figures, run_figures
from cearx.replay.timeline import Timeline
from cearx.replay.trace import Trace
from cearx.replay.verify import describe, differences
from cearx.replay.whole_run import NotWhole, whole_records


class FirstDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first decision, or arrival, in which two logs differ; requests in order of arrival."""

    step_id: StepId | None
    """The step planned last in both."""
    field: str
    left: str
    right: str


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One request in both logs; each change is the second's figure less the first's."""

    arrival: int
    """Its number in order of arrival, in both logs."""
    left_id: RequestId
    right_id: RequestId
    waited_us: int
    ttft_us: int | None
    preemptions: int
    hit_tokens: int
    left_ended: str
    right_ended: str

    @property
    def size(self) -> int:
        return max(abs(self.waited_us), abs(self.ttft_us or 0))


class AdmissionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """In which order requests got in for the first time."""

    num_moved: int
    """Requests at another position."""
    first: int | None
    """The first position that differs."""
    left: int | None
    """Who is there, by order of arrival."""
    right: int | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `diff` says."""

    config: dict[str, tuple[str, str]]
    """Fields of the configuration that differ."""
    first: FirstDifference | None
    order: AdmissionOrder
    effects: list[Effect]
    """The largest first."""
    num_unmatched: int
    """Requests that only one log has."""
    left: RunFigures
    right: RunFigures


class _Side:
    """One log on its way through the comparison."""

    def __init__(self, path: Path, trace: Trace) -> None:
        self._path = path
        self.timeline = Timeline(trace.header.config)
        self.step_id: StepId | None = None
        self._trace = trace
        self._arrival: dict[RequestId, int] = {}

    def __iter__(self) -> Iterator[Decision | RequestArrived]:
        """Arrivals and decisions with requests by order of arrival, without block numbers.

        What is wrong with the log is raised with a note that names the file.
        """
        try:
            yield from self._values()
        except (TraceDamaged, TraceIncompatible, NotWhole) as error:
            error.add_note(str(self._path))
            raise

    def _values(self) -> Iterator[Decision | RequestArrived]:
        for record in whole_records(self._trace):
            value = record.value
            self.timeline.feed(value)
            if isinstance(value, RequestArrived):
                number = self._arrival.setdefault(value.request_id, len(self._arrival))
                # Hashes are keyed anew in each boot: only their number can be compared.
                yield msgspec.structs.replace(
                    value,
                    request_id=RequestId(number),
                    block_hashes=(),
                    frontend_index=0,
                )
            elif isinstance(value, StepPlan):
                self.step_id = value.step_id
                yield self._plan(value)
            elif isinstance(value, RequestEnded | RequestRefused):
                yield msgspec.structs.replace(value, request_id=self._number(value.request_id))

    def _number(self, request_id: RequestId) -> RequestId:
        return RequestId(self._arrival.get(request_id, -1))

    def _plan(self, plan: StepPlan) -> StepPlan:
        number = self._number

        def renamed(
            entries: Iterable[PrefillChunk | BlocksGranted | Admission | RequestWaits],
        ) -> tuple[object, ...]:
            return tuple(
                msgspec.structs.replace(entry, request_id=number(entry.request_id))
                for entry in entries
            )

        granted = [
            msgspec.structs.replace(g, block_ids=(BlockId(0),) * len(g.block_ids))
            for g in plan.granted
        ]
        return msgspec.structs.replace(
            plan,
            step_id=StepId(0),
            decodes=tuple(map(number, plan.decodes)),
            chunks=renamed(plan.chunks),
            granted=renamed(granted),
            admitted=renamed(plan.admitted),
            preempted=tuple(map(number, plan.preempted)),
            waits=renamed(plan.waits),
        )


def compare(first_log: tuple[Path, Trace], second_log: tuple[Path, Trace]) -> Comparison:
    """Reads both logs to their ends; raises NotWhole and what reading them raises."""
    sides = _Side(*first_log), _Side(*second_log)
    first = None
    for a, b in itertools.zip_longest(*sides):
        if first is None and a != b:
            first = _first(sides[0].step_id, a, b)
    timelines = [side.timeline for side in sides]
    for timeline in timelines:
        timeline.finish()
    figures = [[request_figures(line, t) for line in t.requests.values()] for t in timelines]
    effects = [_effect(n, *pair) for n, pair in enumerate(zip(*figures, strict=False))]
    effects.sort(key=lambda effect: (-effect.size, effect.arrival))
    return Comparison(
        config=_config_changes(*(trace.header.config for _, trace in (first_log, second_log))),
        first=first,
        order=_order(*timelines),
        effects=effects,
        num_unmatched=abs(len(figures[0]) - len(figures[1])),
        left=run_figures(timelines[0], figures[0]),
        right=run_figures(timelines[1], figures[1]),
    )


def _first(step_id: StepId | None, left: object, right: object) -> FirstDifference:
    if type(left) is not type(right):
        name = " / ".join(
            "end of the log" if v is None else type(v).__name__ for v in (left, right)
        )
        return FirstDifference(step_id=step_id, field=name, left=_text(left), right=_text(right))
    path, a, b = next(differences(type(left).__name__, left, right))
    return FirstDifference(step_id=step_id, field=path, left=describe(a), right=describe(b))


def _text(value: object) -> str:
    return "nothing" if value is None else describe(value)


def _config_changes(left: SchedulerConfig, right: SchedulerConfig) -> dict[str, tuple[str, str]]:
    pairs = ((name, getattr(left, name), getattr(right, name)) for name in left.__struct_fields__)
    return {name: (str(a), str(b)) for name, a, b in pairs if a != b}


def _effect(number: int, left: RequestFigures, right: RequestFigures) -> Effect:
    ttft = None
    if left.ttft_us is not None and right.ttft_us is not None:
        ttft = right.ttft_us - left.ttft_us
    return Effect(
        arrival=number,
        left_id=left.request_id,
        right_id=right.request_id,
        waited_us=right.waited_us - left.waited_us,
        ttft_us=ttft,
        preemptions=right.num_preemptions - left.num_preemptions,
        hit_tokens=right.num_hit_tokens - left.num_hit_tokens,
        left_ended=left.ended,
        right_ended=right.ended,
    )


def _order(left: Timeline, right: Timeline) -> AdmissionOrder:
    orders: list[list[int]] = []
    for timeline in (left, right):
        admitted = [
            (line.admissions[0].step, number)
            for number, line in enumerate(timeline.requests.values())
            if line.admissions
        ]
        orders.append([number for _, number in sorted(admitted)])
    moved = [n for n, (a, b) in enumerate(itertools.zip_longest(*orders)) if a != b]
    if not moved:
        return AdmissionOrder(num_moved=0, first=None, left=None, right=None)
    at = moved[0]
    who = [order[at] if at < len(order) else None for order in orders]
    return AdmissionOrder(num_moved=len(moved), first=at, left=who[0], right=who[1])
