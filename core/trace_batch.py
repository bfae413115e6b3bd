"""Several records in one frame: what a step's records share is written once.

    payload = record*
    record  = kind u8 (type | flags << 6) | size (7 bits a byte, lowest first) | payload

The frame's flags are the number of records, its sequence number is the first one's. Pure functions
over bytes, called by `trace_segment.py` and `replay/trace.py`; what the payloads mean is
`trace_records.py`'s business.
"""

from collections.abc import Iterator, Sequence

from cearx.core.trace_format import Frame, RecordType, TraceIncompatible

Encoded = tuple[int, int, bytes]
"""Type, flags and payload of a record."""

MAX_RECORDS = 255
MAX_BYTES = 64 * 1024
"""Of a batch's payload; a larger record has a frame of its own."""
_TYPE_BITS = 6
_SIZE_BYTES_MAX = 3


def batches(records: Sequence[Encoded]) -> Iterator[tuple[int, Encoded]]:
    """The frames that hold these records, each with the index of its first one."""
    first = size = 0
    for index, (_type, _flags, payload) in enumerate(records):
        needed = len(payload) + 1 + _SIZE_BYTES_MAX
        if index > first and (size + needed > MAX_BYTES or index - first == MAX_RECORDS):
            yield first, _frame(records[first:index])
            first, size = index, 0
        size += needed
    if records:
        yield first, _frame(records[first:])


def _frame(records: Sequence[Encoded]) -> Encoded:
    if len(records) == 1:
        return records[0]
    packed = bytearray()
    for record_type, flags, payload in records:
        packed.append(record_type | flags << _TYPE_BITS)
        size = len(payload)
        while size > 127:
            packed.append(size & 127 | 128)
            size >>= 7
        packed.append(size)
        packed += payload
    return RecordType.BATCH, len(records), bytes(packed)


def split(frame: Frame) -> Iterator[Frame]:
    """The records of a frame, as if each had one; raises TraceIncompatible."""
    if frame.type != RecordType.BATCH:
        yield frame
        return
    data, at = frame.payload, 0
    for index in range(frame.flags):
        size = shift = 0
        head = data[at : at + 1 + _SIZE_BYTES_MAX]
        used = 1
        for byte in head[1:]:
            size |= (byte & 127) << shift
            shift += 7
            used += 1
            if byte < 128:
                break
        start = at + used
        at = start + size
        if used == 1 or head[used - 1] > 127 or at > len(data):
            raise _broken(frame, f"its record {index} is not whole")
        kind = head[0]
        record_type, flags = kind & (1 << _TYPE_BITS) - 1, kind >> _TYPE_BITS
        if record_type == RecordType.BATCH:
            raise _broken(frame, f"its record {index} is a batch")
        yield Frame(frame.offset, frame.seq + index, record_type, flags, data[start:at])
    if at != len(data):
        raise _broken(frame, f"{len(data) - at} bytes stand behind its records")


def _broken(frame: Frame, what: str) -> TraceIncompatible:
    return TraceIncompatible(f"batch {frame.seq} at offset {frame.offset}: {what}")
