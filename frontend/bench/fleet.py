"""The client processes of a benchmark: started once, given a load a run, ended with it.

Owns their pipes, the spread of requests over them and the shared concurrency gate. Never looks into
a request or a record. Used by `matrix.py` and `serve.py`.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from cearx.frontend.bench.bench_error import BenchError
from cearx.frontend.bench.concurrency_gate import MAX_PLACES, fill_gate, open_gate
from cearx.frontend.bench.wire import (
    LENGTH,
    Begin,
    ClientLoad,
    Done,
    FromClient,
    Load,
    PlannedRequest,
    Progress,
    Ready,
    StreamRecord,
    Target,
    ToClient,
    decode_from_client,
    frame,
)

MODULE = "cearx.frontend.bench.client_process"
HEAD_START_S = 0.05
"""From the word that all are ready to the run's begin, so that none comes late."""
STREAMS_PER_CLIENT = 16
"""A burst of so many requests is out within a few milliseconds."""
CORES_PER_CLIENT = 4
"""The server needs the others."""
MAX_CLIENTS = 64
END_TIMEOUT_S = 5.0
BUSY_LIMIT = 0.8
LAG_LIMIT_MS = 5.0

OnProgress = Callable[[int, int], None]
"""Called with the number of ended requests and of chunks of the whole run."""


class RunRecords(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run's clients saw."""

    records: list[StreamRecord]
    """In the order of the requests."""
    clients: list[ClientLoad]

    @property
    def limits(self) -> list[str]:
        """Why the clients may have set the figures instead of the server; else empty."""
        reasons = []
        for index, client in enumerate(self.clients):
            if client.busy_share > BUSY_LIMIT:
                reasons.append(f"client {index} was {client.busy_share:.0%} busy")
            if client.lag_p99_ms > LAG_LIMIT_MS:
                reasons.append(f"client {index}'s event loop was {client.lag_p99_ms:.1f} ms late")
        return reasons


def auto_num_clients(concurrency: int, num_cores: int) -> int:
    """Enough processes for so many streams, and a fourth of the cores at most."""
    wanted = -(-concurrency // STREAMS_PER_CLIENT)
    return max(1, min(wanted, num_cores // CORES_PER_CLIENT, MAX_CLIENTS))


class Fleet:
    """Running client processes; made by `open_fleet`."""

    def __init__(self, processes: list[asyncio.subprocess.Process], gate: tuple[int, int]) -> None:
        self._processes = processes
        self._gate = gate

    @property
    def num_clients(self) -> int:
        return len(self._processes)

    async def run(
        self,
        target: Target,
        requests: Sequence[PlannedRequest],
        *,
        max_concurrency: int | None = None,
        on_progress: OnProgress = lambda num_ended, num_chunks: None,
    ) -> RunRecords:
        """Sends the requests, spread in turn over the processes; raises BenchError."""
        is_gated = max_concurrency is not None and max_concurrency < len(requests)
        if is_gated and max_concurrency is not None:
            if max_concurrency > MAX_PLACES:
                raise BenchError(
                    f"--max-concurrency must be at most {MAX_PLACES}, got {max_concurrency}"
                )
            fill_gate(*self._gate, max_concurrency)
        clients = self._processes[: max(1, min(len(self._processes), len(requests)))]
        shares = [list(requests[index :: len(clients)]) for index in range(len(clients))]
        for client, share in zip(clients, shares, strict=True):
            await _send(client, Load(target=target, requests=share, is_gated=is_gated))
        for client in clients:
            ready = await _receive(client)
            assert isinstance(ready, Ready), f"a client must get ready first, got {ready}"
        begin = Begin(at=time.monotonic() + HEAD_START_S)
        for client in clients:
            await _send(client, begin)
        latest = [Progress(num_ended=0, num_chunks=0)] * len(clients)

        async def follow(index: int) -> Done:
            while True:
                message = await _receive(clients[index])
                if isinstance(message, Done):
                    return message
                assert isinstance(message, Progress), f"no progress: {message}"
                latest[index] = message
                on_progress(
                    sum(one.num_ended for one in latest), sum(one.num_chunks for one in latest)
                )

        done = await asyncio.gather(*(follow(index) for index in range(len(clients))))
        records = [record for one in done for record in one.records]
        records.sort(key=lambda record: record.index)
        return RunRecords(records=records, clients=[one.load for one in done])

    async def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        for fd in self._gate:
            os.close(fd)


@contextlib.asynccontextmanager
async def open_fleet(num_clients: int) -> AsyncIterator[Fleet]:
    """Client processes for the time of the block."""
    gate = open_gate()
    command = [sys.executable, "-P", "-m", MODULE, *map(str, gate)]
    processes = [
        await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=gate,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        for _ in range(num_clients)
    ]
    fleet = Fleet(processes, gate)
    try:
        yield fleet
    finally:
        for process in processes:
            if sys.exc_info()[0] is not None and process.returncode is None:
                process.kill()  # amid a run it would not read its input's end
        await fleet.close()


async def _send(process: asyncio.subprocess.Process, message: ToClient) -> None:
    assert process.stdin is not None, "clients have pipes"
    try:
        process.stdin.write(frame(message))
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError) as error:
        raise BenchError(await _death(process)) from error


async def _receive(process: asyncio.subprocess.Process) -> FromClient:
    assert process.stdout is not None, "clients have pipes"
    try:
        head = await process.stdout.readexactly(LENGTH.size)
        return decode_from_client(await process.stdout.readexactly(LENGTH.unpack(head)[0]))
    except asyncio.IncompleteReadError as error:
        raise BenchError(await _death(process)) from error


async def _death(process: asyncio.subprocess.Process) -> str:
    return f"a client process ended with exit code {await process.wait()} amid a run"
