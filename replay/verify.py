"""Feeds a trace's inputs to a fresh scheduler and compares every decision with the logged one.

Owns the comparison and the description of the first difference. Pure: no file, no clock; the
caller brings the records one by one. Called by `cli.py` and tests.
"""

from collections import deque
from collections.abc import Iterator

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    ClockAdvanced,
    Decision,
    Event,
    Outcome,
    StepPlan,
)
from cearx.core.identifiers import RequestId, StepId
from cearx.core.scheduler import Scheduler
from cearx.core.scheduler_state import SchedulerState
from cearx.core.trace_format import TraceIncompatible
from cearx.core.trace_records import StepNote, TraceGap, TraceSnapshot
from cearx.replay.snapshot_cost import require_bounded
from cearx.replay.trace import TraceRecord

MAX_BLOCKS = 1 << 20
"""Largest pool that is rebuilt: the header of a made-up file must not fill the memory."""
NUM_INPUTS_SHOWN = 20
INPUT_BYTES_KEPT = 256 * 1024
"""Inputs further back in the file than this are not shown, so that few are in memory."""
NOTHING = "nothing"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first decision that the scheduler takes otherwise than the log says."""

    seq: int
    offset: int
    """In the file."""
    step_id: StepId | None
    """The step it belongs to, None before the first."""
    field: str
    """Path in the decision, such as `StepPlan.chunks[1].num_tokens`."""
    logged: str
    computed: str
    request_ids: tuple[RequestId, ...]
    """Requests that the two values do not agree on."""
    inputs: tuple[str, ...]
    """The last ones before it, oldest first."""


def fresh_scheduler(config: SchedulerConfig) -> Scheduler:
    """The scheduler that a trace starts from; raises TraceIncompatible for an absurd pool or an
    admission policy that is neither built in nor asked for (`cearx replay --policy NAME`)."""
    if config.num_blocks > MAX_BLOCKS:
        raise TraceIncompatible(f"a pool of {config.num_blocks} blocks, the limit is {MAX_BLOCKS}")
    try:
        return Scheduler(config)
    except ValueError as error:  # an admission policy that nobody has loaded
        text = f"{error}; an installed policy has to be asked for by --policy NAME"
        raise TraceIncompatible(text) from None


def restored_scheduler(config: SchedulerConfig, snapshot: TraceSnapshot) -> Scheduler:
    """The scheduler of a segment's start; raises TraceIncompatible for what is no such state."""
    fresh_scheduler(config)
    require_bounded(snapshot.state)
    try:
        return Scheduler.restore(config, snapshot.state)
    except Exception as error:  # another schema, or a made-up state that contradicts itself
        name = type(error).__name__
        raise TraceIncompatible(f"the snapshot cannot be restored: {name}: {error}") from error


class Verifier:
    """One pass over a trace; stop feeding at the first difference.

    Where the trace begins with a snapshot, or one follows a gap, it goes on from that state; any
    other snapshot must be the state that it has come to.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._knows_state = False
        """Whether an event was applied since the start or a gap."""
        self._outcomes: deque[Decision] = deque()
        """What the last event led to and the log has not shown yet."""
        self._inputs: deque[TraceRecord] = deque(maxlen=NUM_INPUTS_SHOWN)
        self._step_id: StepId | None = None

    def feed(self, record: TraceRecord) -> Difference | None:
        """Takes the next record; answers how it differs from what the scheduler does."""
        value = record.value
        if isinstance(value, StepNote):
            return None
        if isinstance(value, StepPlan):
            if self._outcomes:
                return self._differs(record, value, self._outcomes[0])
            self._step_id = value.step_id
            return self._compare_plan(record, value)
        if isinstance(value, Outcome):
            computed = self._outcomes.popleft() if self._outcomes else None
            return None if value == computed else self._differs(record, value, computed)
        if isinstance(value, TraceGap):
            self._outcomes.clear()
            self._inputs.clear()
            self._knows_state = False
            return None
        if self._outcomes:
            return self._differs(record, None, self._outcomes[0])
        if isinstance(value, TraceSnapshot):
            return self._take_snapshot(record, value)
        return self._apply(record, value)

    def _take_snapshot(self, record: TraceRecord, snapshot: TraceSnapshot) -> Difference | None:
        if self._knows_state and self._scheduler.snapshot() != snapshot.state:
            logged = _state(snapshot.state)
            computed = _state(self._scheduler.snapshot())
            path, logged_part, computed_part = next(
                differences("Snapshot", logged, computed), ("Snapshot", logged, computed)
            )
            parts = describe(logged_part), describe(computed_part)
            return self._difference(record, path, *parts, ())
        if not self._knows_state:
            self._scheduler = restored_scheduler(self._scheduler.config, snapshot)
            self._knows_state = True
        return None

    def finish(self, ended: bool) -> Difference | None:
        """Looks at what is left behind the last record; `ended` is whether the log has its end.

        A scheduler that failed in `plan` left no plan behind the tick, so plan is tried here.
        """
        last = self._inputs[-1] if self._inputs else None
        if last is None:
            return None
        if self._outcomes:
            return self._differs(last, None, self._outcomes[0]) if ended else None
        if not self._scheduler.has_work() or not isinstance(last.value, ClockAdvanced):
            return None
        try:
            self._scheduler.plan()
        except Exception as error:  # whatever a scheduler with a fault raises is the finding
            return self._failed(last, error)
        return None

    def _apply(self, record: TraceRecord, event: Event) -> Difference | None:
        self._knows_state = True
        if self._inputs and self._inputs[-1].segment != record.segment:
            self._inputs.clear()  # offsets below are of one file
        self._inputs.append(record)
        while record.offset - self._inputs[0].offset > INPUT_BYTES_KEPT:
            self._inputs.popleft()
        try:
            self._outcomes.extend(self._scheduler.apply(event))
        except Exception as error:  # see above
            return self._failed(record, error)
        return None

    def _compare_plan(self, record: TraceRecord, logged: StepPlan) -> Difference | None:
        try:
            computed = self._scheduler.plan()
        except Exception as error:  # see above
            return self._failed(record, error)
        return None if logged == computed else self._differs(record, logged, computed)

    def _failed(self, record: TraceRecord, error: Exception) -> Difference:
        name = type(record.value).__name__
        reason = f"{type(error).__name__}: {error}"
        return self._difference(record, name, describe(record.value), reason, _ids([record.value]))

    def _differs(
        self, record: TraceRecord, logged: Decision | None, computed: Decision | None
    ) -> Difference:
        if type(logged) is not type(computed):
            found = logged if logged is not None else computed
            left, right = (NOTHING if v is None else describe(v) for v in (logged, computed))
            ids = _ids([logged, computed])
            return self._difference(record, type(found).__name__, left, right, ids)
        name = type(logged).__name__
        path, logged_part, computed_part = next(differences(name, logged, computed))
        left, right = describe(logged_part), describe(computed_part)
        return self._difference(record, path, left, right, _ids(_odd_ones(logged, computed)))

    def _difference(
        self,
        record: TraceRecord,
        field: str,
        logged: str,
        computed: str,
        request_ids: tuple[RequestId, ...],
    ) -> Difference:
        return Difference(
            seq=record.seq,
            offset=record.offset,
            step_id=self._step_id,
            field=field,
            logged=logged,
            computed=computed,
            request_ids=request_ids,
            inputs=tuple(f"{i.seq} {describe(i.value)}" for i in self._inputs),
        )


def differences(
    path: str, logged: object, computed: object
) -> Iterator[tuple[str, object, object]]:
    """Each smallest part that differs, in the order of the fields, with its path."""
    if logged == computed:
        return
    if isinstance(logged, msgspec.Struct) and type(logged) is type(computed):
        for name in logged.__struct_fields__:
            yield from differences(f"{path}.{name}", getattr(logged, name), getattr(computed, name))
    elif isinstance(logged, tuple | list) and isinstance(computed, tuple | list):
        for index, (left, right) in enumerate(zip(logged, computed, strict=False)):
            yield from differences(f"{path}[{index}]", left, right)
        if len(logged) != len(computed):
            index = min(len(logged), len(computed))
            rest = (logged[index:], computed[index:])
            yield (f"{path}[{index}:]", *rest)
    else:
        yield path, logged, computed


def _odd_ones(logged: object, computed: object) -> list[object]:
    """Elements of the first differing field that only one of two decisions has."""
    assert isinstance(logged, msgspec.Struct), f"{logged!r} is no decision"
    for name in logged.__struct_fields__:
        left, right = getattr(logged, name), getattr(computed, name)
        if left != right and isinstance(left, tuple):
            return [x for x in left if x not in right] + [x for x in right if x not in left]
    return [logged, computed]


def _state(state: bytes) -> object:
    """A snapshot's fields where this version knows them."""
    try:
        require_bounded(state)
        return msgspec.msgpack.decode(state, type=SchedulerState)
    except (msgspec.DecodeError, TraceIncompatible):
        return state


def _ids(values: list[object]) -> tuple[RequestId, ...]:
    ids = (
        value if isinstance(value, int) else getattr(value, "request_id", None) for value in values
    )
    return tuple(sorted({RequestId(found) for found in ids if found is not None}))


def describe(value: object) -> str:
    """A record for a person, on one line that stays short whatever it holds."""
    if isinstance(value, msgspec.Struct):
        fields = (f"{name}={describe(getattr(value, name))}" for name in value.__struct_fields__)
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, tuple | list):
        shown = [describe(element) for element in value[:4]]
        if len(value) > len(shown):
            shown.append(f"… {len(value)} in all")
        return f"[{', '.join(shown)}]"
    if isinstance(value, bytes):
        return value[:4].hex() + ("…" if len(value) > 4 else "")
    return getattr(value, "name", None) or repr(value)
