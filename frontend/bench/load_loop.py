"""Sends one process's share of a run: each request at its time, all at once in one event loop.

Owns when a request goes out and how busy the process was meanwhile (`ClientLoad`). Never knows what
the requests are for. Called by `client_process.py`.
"""

import asyncio
import math
import ssl
import time
from collections.abc import Callable

from cearx.frontend.bench.concurrency_gate import ConcurrencyGate
from cearx.frontend.bench.http_stream import request_bytes, stream
from cearx.frontend.bench.wire import ClientLoad, Done, Load, StreamRecord

LAG_PERIOD_S = 0.01
PROGRESS_PERIOD_S = 0.2

OnProgress = Callable[[int, int], None]
"""Called with the number of ended requests and of chunks up to now."""


class LoadLoop:
    """A prepared load; `run` sends it."""

    def __init__(self, load: Load, gate: ConcurrencyGate, on_progress: OnProgress) -> None:
        self._load = load
        self._gate = gate
        self._on_progress = on_progress
        self._tls = ssl.create_default_context() if load.target.is_tls else None
        self._bodies = [request_bytes(load.target, planned.body) for planned in load.requests]
        self._num_ended = 0
        self._num_chunks = 0
        self._lags_s: list[float] = []
        self._late_s = 0.0

    async def run(self, begin: float) -> Done:
        await _until(begin)
        cpu_start, wall_start = time.process_time(), time.monotonic()
        watch = [asyncio.create_task(self._watch_lag()), asyncio.create_task(self._tell())]
        records = [StreamRecord(planned.index, 0.0) for planned in self._load.requests]
        try:
            await asyncio.gather(
                *(self._send(place, record, begin) for place, record in enumerate(records))
            )
        finally:
            for task in watch:
                task.cancel()
        wall_s = time.monotonic() - wall_start
        return Done(
            records=records, load=self._client_load(wall_s, time.process_time() - cpu_start)
        )

    async def _send(self, place: int, record: StreamRecord, begin: float) -> None:
        due = begin + self._load.requests[place].start_s
        await _until(due)
        self._late_s = max(self._late_s, time.monotonic() - due)
        if self._load.is_gated:
            await self._gate.enter()
        try:
            chunks = await stream(self._load.target, self._tls, self._bodies[place], record, begin)
        finally:
            if self._load.is_gated:
                self._gate.leave()
        self._num_chunks += chunks
        self._num_ended += 1

    async def _watch_lag(self) -> None:
        while True:
            due = time.monotonic() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._lags_s.append(max(0.0, time.monotonic() - due))

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_PERIOD_S)
            self._on_progress(self._num_ended, self._num_chunks)

    def _client_load(self, wall_s: float, cpu_s: float) -> ClientLoad:
        lags = sorted(self._lags_s) or [0.0]
        return ClientLoad(
            busy_share=cpu_s / wall_s if wall_s > 0 else 0.0,
            lag_p99_ms=lags[math.ceil(0.99 * len(lags)) - 1] * 1e3,
            lag_max_ms=lags[-1] * 1e3,
            num_chunks=self._num_chunks,
            late_ms=self._late_s * 1e3,
        )


async def _until(due: float) -> None:
    delay = due - time.monotonic()
    if delay > 0:
        await asyncio.sleep(delay)
