"""Messages between the benchmark's parent and its client processes, as frames on pipes.

Owns types and framing, nothing else: a frame is four bytes of length and a msgpack body. Times are
seconds; points in time are of `time.monotonic`, one clock for all processes of a machine.
"""

import struct

import msgspec

LENGTH = struct.Struct("<I")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go."""

    host: str
    address: str
    """The host's IP address, looked up once."""
    port: int
    is_tls: bool
    path: str
    headers: dict[str, str]
    request_timeout_s: float


class PlannedRequest(msgspec.Struct, frozen=True, array_like=True):
    index: int
    """In the whole run, over all processes."""
    start_s: float
    """Seconds after the run's begin."""
    body: bytes


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One process's share of a run."""

    target: Target
    requests: list[PlannedRequest]
    is_gated: bool
    """Whether a request needs a place of the concurrency gate."""


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    at: float
    """The run's begin on the shared clock."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The load is prepared; nothing has been sent."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    num_ended: int
    num_chunks: int


class StreamRecord(msgspec.Struct, array_like=True):
    """What one request's client saw; a missing time or count is None."""

    index: int
    start_s: float
    """When it was sent, after the run's begin; so is `end_s`."""
    end_s: float = 0.0
    ttft_s: float | None = None
    """To the first chunk with choices."""
    latency_s: float | None = None
    """To the last chunk with choices."""
    itls_s: list[float] = []
    """Gaps between chunks with choices."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None


class ClientLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy one client process was while it measured."""

    busy_share: float
    """CPU time over wall time."""
    lag_p99_ms: float
    """How late the event loop woke a timer."""
    lag_max_ms: float
    num_chunks: int
    late_ms: float
    """The latest that a request went out after its time, gate aside."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    records: list[StreamRecord]
    load: ClientLoad


ToClient = Load | Begin
FromClient = Ready | Progress | Done

_encode = msgspec.msgpack.Encoder().encode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
decode_from_client = msgspec.msgpack.Decoder(FromClient).decode


def frame(message: ToClient | FromClient) -> bytes:
    body = _encode(message)
    return LENGTH.pack(len(body)) + body
