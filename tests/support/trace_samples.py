"""Records and trace files for the tests of the trace log and of replay."""

from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from random_run import SMALL, RandomRun

from cearx.core.block_hash import DIGEST_SIZE
from cearx.core.config import SchedulerConfig, TraceLimits
from cearx.core.events import (
    Admission,
    BlockSealed,
    BlocksGranted,
    CancelReason,
    CancelRequested,
    ClockAdvanced,
    Decision,
    Event,
    FinishReason,
    PrefillChunk,
    PrefixCacheEmptied,
    PrefixCacheReset,
    RefusalReason,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    RequestWaits,
    RowStopped,
    StepFinished,
    StepPlan,
    WaitReason,
)
from cearx.core.trace_records import StepNote
from cearx.core.trace_writer import TraceWriter

BOOT_ID = 0x1F09C2AA_00112233

u63 = st.integers(0, 2**63 - 1)
ids = st.integers(0, 300) | u63
hashes = st.binary(min_size=DIGEST_SIZE, max_size=DIGEST_SIZE) | st.binary(max_size=20)


def tuples(elements: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(elements, max_size=6).map(tuple)


records = st.one_of(
    st.builds(
        RequestArrived,
        request_id=ids,
        num_prompt_tokens=u63,
        max_tokens=u63,
        block_hashes=tuples(hashes),
        frontend_index=u63,
        arrived_us=u63,
        priority=st.integers(-(2**31), 2**31),
        has_exact_length=st.booleans(),
    ),
    st.builds(PrefixCacheReset),
    st.builds(CancelRequested, request_id=ids, reason=st.sampled_from(CancelReason)),
    st.builds(
        StepFinished,
        step_id=u63,
        stopped=tuples(st.builds(RowStopped, request_id=ids, reason=st.sampled_from(FinishReason))),
        sealed=tuples(st.builds(BlockSealed, request_id=ids, block_hash=hashes)),
        execute_us=u63,
    ),
    st.builds(ClockAdvanced, now_us=u63),
    st.builds(
        StepPlan,
        step_id=u63,
        decodes=st.lists(ids, max_size=80).map(tuple)
        | st.lists(ids, max_size=80, unique=True).map(sorted).map(tuple),
        chunks=tuples(
            st.builds(
                PrefillChunk, request_id=ids, start=u63, num_tokens=u63, samples=st.booleans()
            )
        ),
        granted=tuples(st.builds(BlocksGranted, request_id=ids, block_ids=tuples(ids))),
        admitted=tuples(
            st.builds(Admission, request_id=ids, num_cached_tokens=u63, num_recomputed_tokens=u63)
        ),
        preempted=tuples(ids),
        waits=tuples(st.builds(RequestWaits, request_id=ids, reason=st.sampled_from(WaitReason))),
        margin_blocks=u63,
    ),
    st.builds(RequestEnded, request_id=ids, reason=st.sampled_from(FinishReason)),
    st.builds(
        RequestRefused,
        request_id=ids,
        reason=st.sampled_from(RefusalReason),
        num_tokens=u63,
        limit_tokens=u63,
    ),
    st.builds(PrefixCacheEmptied, num_freed=u63, num_in_use=u63),
    st.builds(StepNote, **dict.fromkeys(StepNote.__struct_fields__, u63)),
)
"""Any record between the header and the end."""


def never(reason: str) -> None:
    """For a writer that must not stop."""
    raise AssertionError(f"the trace stopped: {reason}")


def write_run(
    folder: Path, num_steps: int, seed: int = 0, config: SchedulerConfig = SMALL, close: bool = True
) -> Path:
    """The trace of a random run, with notes, as the core's shell writes it."""
    writer = TraceWriter.open(folder, config, BOOT_ID, never)
    run = RandomRun(config, seed, log=writer)
    for step in range(num_steps):
        run.step()
        writer.append(StepNote(execute_us=8000 + step, schedule_us=90))
    if close:
        run.engine.drain()
        writer.close()
    else:
        writer.flush()
    return writer.path


class MaintainedLog:
    """A writer that is maintained whenever it is flushed: with a step in flight, too."""

    def __init__(self, writer: TraceWriter) -> None:
        self.writer = writer
        self.snapshot: Callable[[], bytes] | None = None

    def append(self, record: Event | Decision) -> None:
        self.writer.append(record)

    def flush(self) -> None:
        self.writer.flush()
        assert self.snapshot is not None, "no scheduler yet"
        self.writer.maintain(self.snapshot)


SMALL_SEGMENTS = TraceLimits(segment_bytes=3000, keep=1000)
"""About a dozen steps of the small configuration; nothing is deleted."""


class SegmentedRun:
    """A random run whose trace has many segments."""

    def __init__(
        self,
        folder: Path,
        seed: int = 0,
        limits: TraceLimits = SMALL_SEGMENTS,
        config: SchedulerConfig = SMALL,
        on_stop: Callable[[str], None] = never,
        boot_id: int = BOOT_ID,
    ) -> None:
        self.notes: list[str] = []
        self.writer = TraceWriter.open(
            folder, config, boot_id, on_stop, limits=limits, on_note=self.notes.append
        )
        self.log = MaintainedLog(self.writer)
        self.run = RandomRun(config, seed, log=self.log)
        self.log.snapshot = self.run.engine.scheduler.snapshot

    def steps(self, num_steps: int) -> None:
        for step in range(num_steps):
            self.run.step()
            self.writer.append(StepNote(execute_us=8000 + step, schedule_us=90))

    def close(self) -> None:
        self.run.engine.drain()
        self.writer.close()


def write_segments(folder: Path, num_steps: int = 100, seed: int = 0) -> list[Path]:
    """The segments of a whole run."""
    run = SegmentedRun(folder, seed)
    run.steps(num_steps)
    run.close()
    return sorted(folder.glob("trace-*.log"))
