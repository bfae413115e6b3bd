"""Comments on silent streams, so that proxies between server and client keep them open.

Owns the timer only: it looks once an interval whether anything was sent, so that an event costs
nothing, and nudges the stream's loop, which sends. Called by `respond.py`.
"""

import asyncio

from cearx.frontend.request_stream import RequestStream

COMMENT = b": keep-alive\n\n"


class KeepAlive:
    """For one stream; `num_sent` counts what was sent. Use inside `with`; 0 seconds: never."""

    def __init__(self, stream: RequestStream, interval_s: float) -> None:
        self.num_sent = 0
        self._stream = stream
        self._interval_s = interval_s
        self._seen = 0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "KeepAlive":
        if self._interval_s:
            self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._look)

    def _look(self) -> None:
        if self.num_sent == self._seen:
            self._stream.nudge()
        self._seen = self.num_sent
        self._wait()
