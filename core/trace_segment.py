"""One segment's bytes: its beginning, then frames of records, numbered and counted.

Pure: no file and no clock. Called by `trace_writer.py`, which begins a new one for every file.
"""

import msgspec

from cearx.core.trace_batch import Encoded, batches
from cearx.core.trace_format import (
    RecordType,
    SegmentHeader,
    encode_frame,
    encode_header,
    max_payload_bytes,
    salt_crc,
)
from cearx.core.trace_records import Record, RecordEncoder, TraceEnd


class SegmentEncoder(msgspec.Struct):
    """Records in the order of `add`; `next_seq` is the number of the next one."""

    header: SegmentHeader
    next_seq: int = 0
    num_events: int = 0
    num_decisions: int = 0
    num_notes: int = 0
    _salted: int = 0
    _encode: RecordEncoder = msgspec.field(default_factory=RecordEncoder)
    _added: list[Encoded] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        self.next_seq = self.header.first_seq
        self._salted = salt_crc(self.header.salt)

    @property
    def num_added(self) -> int:
        """Records that `take` would give."""
        return len(self._added)

    def begin(self, records: list[Record]) -> bytes:
        """The segment's header and its first records, a frame each; raises as `add` does."""
        parts = [encode_header(self.header)]
        for record in records:
            self.add(record)
            parts.append(self.take())
        return b"".join(parts)

    def add(self, record: Record) -> None:
        """Encodes the next record; raises ValueError for one that is too large for a frame."""
        encoded = self._encode.encode(record)
        record_type, _flags, payload = encoded
        limit = max_payload_bytes(record_type)
        if len(payload) > limit:
            raise ValueError(f"a trace record has {len(payload)} bytes, the limit is {limit}")
        self._added.append(encoded)
        self.next_seq += 1
        if record_type < RecordType.STEP_PLAN:
            self.num_events += 1
        elif record_type < RecordType.HEADER:
            self.num_decisions += 1
        elif record_type == RecordType.NOTE:
            self.num_notes += 1

    def take(self) -> bytes:
        """The frames of all that was added since the last time."""
        first_seq = self.next_seq - len(self._added)
        frames = [
            encode_frame(self._salted, first_seq + index, *frame)
            for index, frame in batches(self._added)
        ]
        self._added.clear()
        return b"".join(frames)

    def end(self) -> None:
        """Adds the record that says that nothing follows."""
        self.add(
            TraceEnd(
                num_events=self.num_events,
                num_decisions=self.num_decisions,
                num_notes=self.num_notes,
            )
        )
