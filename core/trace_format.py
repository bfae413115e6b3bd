"""The trace log's file format: a segment header and framed records, as pure functions over bytes.

Owns framing, checksums and what counts as damage; never opens a file and never looks into a payload
(`trace_records.py` does). `trace_writer.py` and `replay/trace.py` are the two callers.

    segment = header (64 bytes) frame*           all integers little-endian
    frame   = len u32 | crc u32 | seq u64 | type u8 | flags u8 | payload (len bytes)
    crc     = CRC32C(salt, len, seq, type, flags, payload)

The salt differs in every segment, so stale bytes of another file never validate.
"""

import mmap
import re
import struct
from collections.abc import Generator
from enum import IntEnum
from pathlib import Path

import google_crc32c
import msgspec

Data = bytes | mmap.mmap
"""What can be read: a whole segment, in memory or mapped."""

MAGIC = b"CXLG"
FORMAT = 1
"""Changes when frames change; the 64 bytes of the segment header stay the same in every format."""
MAX_PAYLOAD_BYTES = 1024 * 1024
MAX_SNAPSHOT_BYTES = 16 * 1024 * 1024
"""Payload of a SNAPSHOT, which holds the whole state; every other record has the limit above."""
RESYNC_BYTES_MAX = 256 * 1024 * 1024
"""Work limit of the search for a valid frame behind a bad one, in bytes checksummed."""
_RESYNC_CANDIDATE_BYTES = 64
"""What looking at one candidate costs, in the same unit."""

_HEADER = struct.Struct("<4sHHIQQQI20xI")
_FRAME = struct.Struct("<IIQBB")
_CHECKED = struct.Struct("<IQBB")
_CRC = struct.Struct("<I")
extend_crc = google_crc32c.extend
HEADER_BYTES = _HEADER.size
FRAME_BYTES = _FRAME.size
MIN_RECORD_BYTES = 3
"""Of a record in a batch: kind, size and a byte of payload."""


class RecordType(IntEnum):
    """What a payload is; never 0, so that a run of zero bytes is no frame.

    Events and decisions have the numbers of their tags in `events.py`.
    """

    REQUEST_ARRIVED = 1
    CANCEL_REQUESTED = 2
    STEP_FINISHED = 3
    CLOCK_ADVANCED = 4
    PREFIX_CACHE_RESET = 5
    STEP_PLAN = 16
    REQUEST_ENDED = 17
    REQUEST_REFUSED = 18
    PREFIX_CACHE_EMPTIED = 19
    HEADER = 32
    """Schema, versions and configuration; the first record of a run."""
    NOTE = 33
    """Measured times; a replay passes over it."""
    END = 34
    """The writer was closed in good order; the last record of a run."""
    SNAPSHOT = 35
    """The scheduler's whole state: what a segment after the first starts from."""
    GAP = 36
    """Records before this place are lost; a SNAPSHOT follows."""
    BATCH = 37
    """Several records, see `trace_batch.py`; the flags are their number."""


COMPACT = 1
"""Flag of a record in its short form: `trace_decodes.py`, `trace_hashes.py`."""
CHANGED = 2
"""Flag of a STEP_PLAN whose decodes are told as a change of those of the plan before."""

# Every offset where a frame can start: a length within its limit, seq < 2**40, a type and flags
# that are in use.
_SMALL_TYPES = [t for t in RecordType if t not in (RecordType.SNAPSHOT, RecordType.BATCH)]
_CANDIDATE = re.compile(
    rb"(?=[\x00-\xff]{2}(?:"
    rb"[\x00-\x10]\x00[\x00-\xff]{9}\x00{3}(?:[%s][\x00-\x02]|%s[\x01-\xff])"
    rb"|[\x00-\xff][\x00\x01][\x00-\xff]{9}\x00{3}%s\x00))"
    % (
        b"".join(re.escape(bytes([record_type])) for record_type in _SMALL_TYPES),
        re.escape(bytes([RecordType.BATCH])),
        re.escape(bytes([RecordType.SNAPSHOT])),
    )
)


class TraceDamaged(Exception):
    """The bytes at `offset` are not what a writer, even a killed one, leaves behind."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"damaged at offset {offset}: {reason}")
        self.offset = offset
        self.reason = reason
        self.path: Path | None = None
        """The file, where the reader knows one."""


class TraceIncompatible(Exception):
    """The bytes are whole, but of a format or schema that this version does not read."""


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first 64 bytes of a file."""

    boot_id: int
    """64 random bits that name a run of the server."""
    salt: int
    """32 random bits, the start of every checksum in this segment."""
    segment: int = 0
    """Number of the file in its run."""
    first_seq: int = 0
    """Sequence number of the first record."""
    prev_last_seq: int = 0
    """Sequence number of the last record of the segment before; 0 in segment 0."""
    flags: int = 0
    format: int = FORMAT


class Frame(msgspec.Struct, frozen=True):
    """A record, or a batch of them, whose checksum holds; its payload is not decoded yet."""

    offset: int
    """Of its first byte in the file."""
    seq: int
    type: int
    flags: int
    payload: bytes

    @property
    def num_records(self) -> int:
        return self.flags if self.type == RecordType.BATCH else 1

    @property
    def end(self) -> int:
        """Offset of the first byte behind it."""
        return self.offset + FRAME_BYTES + len(self.payload)


def encode_header(header: SegmentHeader) -> bytes:
    """The 64 bytes that begin a segment."""
    packed = _HEADER.pack(
        MAGIC,
        header.format,
        header.flags,
        header.segment,
        header.boot_id,
        header.first_seq,
        header.prev_last_seq,
        header.salt,
        0,
    )[: -_CRC.size]
    return packed + _CRC.pack(google_crc32c.value(packed))


def decode_header(data: Data) -> SegmentHeader:
    """Reads the first 64 bytes; raises TraceDamaged or TraceIncompatible."""
    packed = data[:HEADER_BYTES]
    if len(packed) < HEADER_BYTES:
        raise TraceDamaged(0, f"{len(packed)} bytes, a segment header has {HEADER_BYTES}")
    magic, version, flags, segment, boot_id, first_seq, prev_last_seq, salt, crc = _HEADER.unpack(
        packed
    )
    if magic != MAGIC:
        raise TraceDamaged(0, f"starts with {magic!r}, a trace log with {MAGIC!r}")
    if google_crc32c.value(packed[: -_CRC.size]) != crc:
        raise TraceDamaged(0, "checksum of the segment header is wrong")
    if version != FORMAT or flags != 0:
        raise TraceIncompatible(
            f"format {version} with flags {flags}, this version reads format {FORMAT} without"
        )
    return SegmentHeader(
        boot_id=boot_id,
        salt=salt,
        segment=segment,
        first_seq=first_seq,
        prev_last_seq=prev_last_seq,
    )


def salt_crc(salt: int) -> int:
    """The checksum's state behind the salt, computed once a segment."""
    return int(google_crc32c.value(_CRC.pack(salt)))


def max_payload_bytes(record_type: int) -> int:
    """The limit of a record's payload."""
    return MAX_SNAPSHOT_BYTES if record_type == RecordType.SNAPSHOT else MAX_PAYLOAD_BYTES


def encode_frame(salted: int, seq: int, record_type: int, flags: int, payload: bytes) -> bytes:
    """One frame; `salted` is `salt_crc`. Raises ValueError over the limit of its payload."""
    size = len(payload)
    if size > MAX_PAYLOAD_BYTES and size > max_payload_bytes(record_type):
        limit = max_payload_bytes(record_type)
        raise ValueError(f"a trace record has {size} bytes, the limit is {limit}")
    crc = extend_crc(extend_crc(salted, _CHECKED.pack(size, seq, record_type, flags)), payload)
    return _FRAME.pack(size, crc, seq, record_type, flags) + payload


def decode_frame(data: Data, offset: int, salted: int) -> Frame | None:
    """The frame that starts at `offset`, or None when there is no valid one."""
    start = offset + FRAME_BYTES
    if start > len(data):
        return None
    size, crc, seq, record_type, flags = _FRAME.unpack_from(data, offset)
    if start + size > len(data):
        return None
    if size > MAX_PAYLOAD_BYTES and size > max_payload_bytes(record_type):
        return None
    payload = data[start : start + size]
    checked = extend_crc(salted, _CHECKED.pack(size, seq, record_type, flags))
    if extend_crc(checked, payload) != crc:
        return None
    return Frame(offset, seq, record_type, flags, payload)


def frames(data: Data, header: SegmentHeader) -> Generator[Frame, None, int | None]:
    """All frames of a segment, numbered without holes.

    Returns the offset of a torn tail, or None when the last frame ends with the file. Raises
    TraceDamaged at a bad frame that any valid one follows, and at a frame out of sequence.
    """
    salted = salt_crc(header.salt)
    offset, seq, size = HEADER_BYTES, header.first_seq, len(data)
    while offset < size:
        frame = decode_frame(data, offset, salted)
        if frame is None:
            _require_torn(data, offset, seq, salted)
            return offset
        if frame.seq != seq:
            raise TraceDamaged(offset, f"record {frame.seq} stands where record {seq} belongs")
        yield frame
        offset += FRAME_BYTES + len(frame.payload)
        seq += frame.num_records
    return None


def count_records(data: bytes) -> int:
    """How many records stand in the whole frames that these bytes of a writer begin with.

    Checksums are not looked at.
    """
    offset = count = 0
    while offset + FRAME_BYTES <= len(data):
        size, _crc, _seq, record_type, flags = _FRAME.unpack_from(data, offset)
        offset += FRAME_BYTES + size
        if offset <= len(data):
            count += flags if record_type == RecordType.BATCH else 1
    return count


def _require_torn(data: Data, offset: int, seq: int, salted: int) -> None:
    """Raises TraceDamaged if a valid frame starts anywhere behind the bad one at `offset`.

    The sequence number of a frame of this segment is bounded by what fits into the file: that
    leaves few candidates to checksum, and the work limit holds for a file made to have many.
    """
    last_seq = seq + (len(data) - offset) // MIN_RECORD_BYTES
    work = 0
    for candidate in _CANDIDATE.finditer(data, offset + 1):
        start = candidate.start()
        size, _, found_seq, _, _ = _FRAME.unpack_from(data, start)
        work += _RESYNC_CANDIDATE_BYTES
        if found_seq <= last_seq and start + FRAME_BYTES + size <= len(data):
            work += size
            if decode_frame(data, start, salted) is not None:
                raise TraceDamaged(offset, f"a bad record, and a valid one follows at {start}")
        if work > RESYNC_BYTES_MAX:
            raise TraceDamaged(offset, "a bad record, and too much behind it that looks like one")
