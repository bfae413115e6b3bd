"""Reads on while a request is answered and another one is begun behind it on the same connection.

hypercorn stops reading then, so that a client that has left would be noticed only by its broken
connection, and by one that waits for a whole answer not at all. Owns the bytes that came early.
Used by `http_server.py`, in place of the event on which hypercorn's HTTP/1.1 waits.
"""

import asyncio

from hypercorn.asyncio.worker_context import EventWrapper
from hypercorn.events import Closed
from hypercorn.protocol.h11 import H11Protocol

MAX_BYTES = 64 * 1024
"""More is left to the socket's buffers: whoever sends so much is not watched any longer."""


class PeerGone(Exception):
    """The client has closed its end while it waited for an answer; the protocol knows."""


class ReadAhead(EventWrapper):
    """Set when the answer is out; `wait` is called in the task that reads."""

    def __init__(self, reader: asyncio.StreamReader, protocol: H11Protocol) -> None:
        super().__init__()
        self._reader = reader
        self._protocol = protocol

    async def wait(self) -> None:
        """Until `set`; raises PeerGone."""
        early = bytearray()
        answered = asyncio.ensure_future(self._event.wait())
        try:
            while not answered.done() and len(early) < MAX_BYTES:
                reading = asyncio.ensure_future(self._read())
                await asyncio.wait((reading, answered), return_when=asyncio.FIRST_COMPLETED)
                reading.cancel()
                await asyncio.wait((reading,))  # a reader has room for one that waits
                if not reading.cancelled():
                    early += await self._received(reading)
            await answered
        finally:
            answered.cancel()
        if early:  # nothing would tell h11 that the client has closed its end
            self._protocol.connection.receive_data(bytes(early))

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(MAX_BYTES)
        except OSError:
            return b""

    async def _received(self, reading: "asyncio.Future[bytes]") -> bytes:
        data = reading.result()
        if not data:
            await self._protocol.handle(Closed())
            raise PeerGone
        return data
