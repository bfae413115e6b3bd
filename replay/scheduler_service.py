"""`python -m cearx.replay.scheduler_service`: this tree's scheduler, driven over two pipes.

Lets one process compare the schedulers of two checkouts. Owns the wire format, length-prefixed
msgpack; the answer to a call is its value, or the text of what it raised. `other_tree.py` calls.
"""

import struct
import sys
from typing import BinaryIO

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import Decision, Event
from cearx.core.scheduler import Scheduler

_LENGTH = struct.Struct("<I")


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Forget everything and start with a fresh scheduler."""

    config: SchedulerConfig


class Apply(msgspec.Struct, frozen=True, tag="apply"):
    event: Event


class MakePlan(msgspec.Struct, frozen=True, tag="plan"):
    pass


Call = Begin | Apply | MakePlan


class Answer(msgspec.Struct, frozen=True):
    decisions: tuple[Decision, ...] = ()
    raised: str | None = None


def write_message(stream: BinaryIO, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_message(stream: BinaryIO) -> bytes | None:
    """The next message, None at the end of the stream."""
    prefix = stream.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(prefix)
    data = stream.read(size)
    return data if len(data) == size else None


def serve(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Answers calls until the stream ends."""
    scheduler: Scheduler | None = None
    while (data := read_message(incoming)) is not None:
        call = msgspec.msgpack.decode(data, type=Call)
        try:
            if isinstance(call, Begin):
                scheduler = Scheduler(call.config)
                answer = Answer()
            else:
                assert scheduler is not None, "no scheduler yet"
                if isinstance(call, Apply):
                    answer = Answer(decisions=scheduler.apply(call.event))
                else:
                    plan = scheduler.plan()
                    answer = Answer(decisions=() if plan is None else (plan,))
        except Exception as error:  # told to the caller, whose scheduler may do better
            answer = Answer(raised=f"{type(error).__name__}: {error}")
        write_message(outgoing, answer)


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
