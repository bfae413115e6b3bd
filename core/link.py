"""Links: typed messages over ZeroMQ, with a header that tells late, doubled and foreign frames.

A frame is a 20-byte header (boot id, epoch, sequence number) and a msgpack body. A frame that does
not decode, is too large or belongs to another boot is dropped and counted, never raised. A link
never blocks its process: what the peer cannot take yet is kept, in order, and sent by `flush`.
"""

import struct
from collections import deque
from typing import Generic, TypeVar

import msgspec
import zmq

SEND = TypeVar("SEND")
RECEIVE = TypeVar("RECEIVE")

HEADER = struct.Struct("<QIQ")
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Larger than any step: one that admits 64 requests of a million cached tokens, 4 bytes each."""
HIGH_WATER_MARK = 1024
"""Messages that ZeroMQ queues in each direction before it reports that it is full."""
MAX_PENDING = 65536
"""Messages kept for a peer that does not read; one more and the peer counts as lost."""
LINGER_MS = 500


class LinkCounters(msgspec.Struct, kw_only=True):
    """What a link dropped; a rising number is a fault of the peer."""

    malformed: int = 0
    foreign: int = 0
    """Of another boot or another epoch."""
    stale: int = 0
    """A sequence number that was seen already."""


class PeerLost(Exception):
    """The peer has not read for so long that its messages no longer fit."""


def configure(socket: zmq.Socket[bytes]) -> None:
    """The options of every socket: finite queues, bounded sizes and linger, no silent drops."""
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    elif socket.type == zmq.DEALER:
        socket.setsockopt(zmq.IMMEDIATE, 1)


class Channel(Generic[SEND, RECEIVE]):
    """One peer's two directions: numbers and frames what goes out, checks and types what comes in.

    Raises nothing on bad input: `decode` answers None and counts.
    """

    def __init__(self, boot_id: int, epoch: int, receive_type: type[RECEIVE] | object) -> None:
        self.boot_id = boot_id
        self.epoch = epoch
        self.counters = LinkCounters()
        self._next_seq = 0
        self._last_seen = -1
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[RECEIVE] = msgspec.msgpack.Decoder(receive_type)

    def encode(self, message: SEND) -> bytes:
        header = HEADER.pack(self.boot_id, self.epoch, self._next_seq)
        self._next_seq += 1
        return header + self._encoder.encode(message)

    def decode(self, frame: bytes) -> RECEIVE | None:
        if not HEADER.size < len(frame) <= MAX_MESSAGE_BYTES:
            self.counters.malformed += 1
            return None
        boot_id, epoch, seq = HEADER.unpack_from(frame)
        if boot_id != self.boot_id or epoch != self.epoch:
            self.counters.foreign += 1
            return None
        if seq <= self._last_seen:
            self.counters.stale += 1
            return None
        try:
            message = self._decoder.decode(memoryview(frame)[HEADER.size :])
        except (msgspec.DecodeError, RecursionError):
            self.counters.malformed += 1
            return None
        self._last_seen = seq
        return message


class DealerLink(Generic[SEND, RECEIVE]):
    """A socket with exactly one peer (DEALER on both ends)."""

    def __init__(self, socket: zmq.Socket[bytes], channel: Channel[SEND, RECEIVE]) -> None:
        self.socket = socket
        self.channel = channel
        self._pending: deque[bytes] = deque()

    def send(self, message: SEND) -> None:
        """Sends or keeps; raises PeerLost when MAX_PENDING messages wait already."""
        if len(self._pending) >= MAX_PENDING:
            raise PeerLost(f"{MAX_PENDING} messages wait for a peer that does not read")
        self._pending.append(self.channel.encode(message))
        self.flush()

    def flush(self) -> None:
        while self._pending:
            try:
                self.socket.send(self._pending[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._pending.popleft()

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def receive(self) -> RECEIVE | None:
        """The next good message that has arrived, or None; bad frames are passed over."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            message = self.channel.decode(frames[-1]) if len(frames) == 1 else None
            if len(frames) != 1:
                self.channel.counters.malformed += 1
            if message is not None:
                return message
