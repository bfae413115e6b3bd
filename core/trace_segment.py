"""One segment's bytes: its beginning, then a frame a record, numbered and counted.

Pure: no file and no clock. Called by `trace_writer.py`, which begins a new one for every file.
"""

import msgspec

from cearx.core.trace_format import (
    RecordType,
    SegmentHeader,
    encode_frame,
    encode_header,
    salt_crc,
)
from cearx.core.trace_records import Record, RecordEncoder, TraceEnd


class SegmentEncoder(msgspec.Struct):
    """Frames in the order of `frame`; `next_seq` is the number of the next one."""

    header: SegmentHeader
    next_seq: int = 0
    num_events: int = 0
    num_decisions: int = 0
    num_notes: int = 0
    _salted: int = 0
    _encode: RecordEncoder = msgspec.field(default_factory=RecordEncoder)

    def __post_init__(self) -> None:
        self.next_seq = self.header.first_seq
        self._salted = salt_crc(self.header.salt)

    def begin(self, records: list[Record]) -> bytes:
        """The segment's header and its first records; raises ValueError for a record too large."""
        return encode_header(self.header) + b"".join([self.frame(record) for record in records])

    def frame(self, record: Record) -> bytes:
        """The next record's frame; raises ValueError for one that is too large."""
        record_type, flags, payload = self._encode.encode(record)
        frame = encode_frame(self._salted, self.next_seq, record_type, flags, payload)
        self.next_seq += 1
        if record_type < RecordType.STEP_PLAN:
            self.num_events += 1
        elif record_type < RecordType.HEADER:
            self.num_decisions += 1
        elif record_type == RecordType.NOTE:
            self.num_notes += 1
        return frame

    def end(self) -> bytes:
        """The frame that says that nothing follows."""
        return self.frame(
            TraceEnd(
                num_events=self.num_events,
                num_decisions=self.num_decisions,
                num_notes=self.num_notes,
            )
        )
