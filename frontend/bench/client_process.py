"""`python -m cearx.frontend.bench.client_process`: one process that sends requests and times them.

Owns the talk with the parent on standard input and output (`wire.py`): a load, ready, begin, the
records; again until the input ends. Started by `fleet.py`.
"""

import asyncio
import gc
import os
import sys
from typing import BinaryIO

import uvloop

from cearx.frontend.bench.concurrency_gate import ConcurrencyGate
from cearx.frontend.bench.load_loop import LoadLoop
from cearx.frontend.bench.wire import (
    LENGTH,
    Begin,
    Done,
    FromClient,
    Load,
    Progress,
    Ready,
    ToClient,
    decode_to_client,
    frame,
)


def read_message(stream: BinaryIO) -> ToClient | None:
    """The next message, or None when the parent has closed the pipe."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return decode_to_client(stream.read(LENGTH.unpack(head)[0]))


def write_message(stream: BinaryIO, message: FromClient) -> None:
    stream.write(frame(message))
    stream.flush()


async def run_for_parent(loop: LoadLoop, begin: float, source: BinaryIO) -> Done:
    """Runs the load, and ends this process at once when the parent has ended, by whatever way.

    The parent says nothing amid a run, so that its pipe becomes readable by its end alone; streams
    of a server that has fallen silent would otherwise wait for ever.
    """
    asyncio.get_running_loop().add_reader(source.fileno(), os._exit, 1)
    try:
        return await loop.run(begin)
    finally:
        asyncio.get_running_loop().remove_reader(source.fileno())
        os.set_blocking(source.fileno(), True)  # the event loop has made it non-blocking


def serve_parent(source: BinaryIO, sink: BinaryIO, gate: ConcurrencyGate) -> None:
    while (load := read_message(source)) is not None:
        assert isinstance(load, Load), f"a load must come first, got {load}"

        def tell(num_ended: int, num_chunks: int) -> None:
            write_message(sink, Progress(num_ended=num_ended, num_chunks=num_chunks))

        loop = LoadLoop(load, gate, tell)
        gc.collect()
        gc.freeze()  # a full collection amid a run would look like the server's pause
        gc.disable()
        write_message(sink, Ready())
        begin = read_message(source)
        if begin is None:
            return
        assert isinstance(begin, Begin), f"the begin must follow, got {begin}"
        done = uvloop.run(run_for_parent(loop, begin.at, source))
        gc.enable()
        write_message(sink, done)


def main() -> int:
    gate = ConcurrencyGate(int(sys.argv[1]), int(sys.argv[2]))
    try:
        serve_parent(sys.stdin.buffer, sys.stdout.buffer, gate)
    except (BrokenPipeError, KeyboardInterrupt, asyncio.CancelledError):
        return 1  # the parent has ended or was interrupted, and says so itself
    return 0


if __name__ == "__main__":
    sys.exit(main())
