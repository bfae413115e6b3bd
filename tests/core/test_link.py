"""Links: typed messages arrive once and in order; bad frames are counted and change nothing."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from cearx.core.events import CancelReason
from cearx.core.identifiers import RequestKey
from cearx.core.link import HEADER, Channel, DealerLink, configure
from cearx.core.messages import Cancel, FrontendHello, FrontendToCore, pack_tokens, unpack_tokens
from cearx.core.router_links import RouterLinks

BOOT = 7


def channel(boot_id: int = BOOT, epoch: int = 0) -> Channel[FrontendToCore, FrontendToCore]:
    return Channel(boot_id, epoch, FrontendToCore)


def cancel(key: int) -> Cancel:
    return Cancel(request_key=RequestKey(key), reason=CancelReason.DISCONNECT)


def test_a_message_survives_the_way() -> None:
    """What is sent is what arrives."""
    assert channel().decode(channel().encode(cancel(3))) == cancel(3)


@pytest.mark.parametrize(("boot_id", "epoch"), [(BOOT + 1, 0), (BOOT, 1)])
def test_foreign_frames_are_dropped(boot_id: int, epoch: int) -> None:
    """A message of another boot or of a restarted peer's past is not ours."""
    receiver = channel()
    assert receiver.decode(channel(boot_id, epoch).encode(cancel(1))) is None
    assert receiver.counters.foreign == 1


def test_doubled_and_late_frames_are_dropped() -> None:
    """A sequence number counts once, and never after a later one."""
    sender, receiver = channel(), channel()
    first, second = sender.encode(cancel(1)), sender.encode(cancel(2))
    assert receiver.decode(second) == cancel(2)
    assert receiver.decode(second) is None
    assert receiver.decode(first) is None
    assert receiver.counters.stale == 2


@given(st.binary(max_size=200))
def test_random_bytes_are_counted(frame: bytes) -> None:
    """No frame of random bytes raises, and none is taken for a message."""
    receiver = channel()
    assert receiver.decode(frame) is None
    assert receiver.counters.malformed + receiver.counters.foreign == 1


@given(st.binary(max_size=100))
def test_random_bodies_are_counted(body: bytes) -> None:
    """A right header does not make a body right."""
    receiver = channel()
    message = receiver.decode(HEADER.pack(BOOT, 0, 0) + body)
    if message is None:
        assert receiver.counters.malformed == 1
    else:
        assert msgspec.msgpack.decode(body, type=FrontendToCore) == message


def test_a_deeply_nested_body_is_counted() -> None:
    """Recursion in a decoder ends as one malformed frame."""
    receiver = channel()
    assert receiver.decode(HEADER.pack(BOOT, 0, 0) + b"\x91" * 100_000) is None
    assert receiver.counters.malformed == 1


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_packing_round_trips(token_ids: list[int]) -> None:
    """Token ids travel as little-endian int32."""
    packed = pack_tokens(token_ids)
    assert list(unpack_tokens(packed)) == token_ids
    assert len(packed) == 4 * len(token_ids)
    if token_ids:
        assert packed[:4] == token_ids[0].to_bytes(4, "little", signed=True)


ALIVE: list[object] = []
"""Links of the running test: the context closes their sockets, not the garbage collector."""


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)
    ALIVE.clear()


def router(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, *names: str
) -> RouterLinks[FrontendToCore, FrontendToCore]:
    links: RouterLinks[FrontendToCore, FrontendToCore] = RouterLinks(
        context, address, BOOT, names, FrontendToCore
    )
    ALIVE.append(links)
    return links


def dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, name: str
) -> DealerLink[FrontendToCore, FrontendToCore]:
    socket = context.socket(zmq.DEALER)
    configure(socket)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.connect(address)
    assert socket.poll(2000, zmq.POLLOUT), "not connected"  # until then a send is kept
    ALIVE.append(socket)
    return DealerLink(socket, channel())


def test_router_names_its_peers(context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> None:
    """Messages carry their sender's name; strangers and garbage are counted."""
    address = f"ipc://{tmp_path}/s"
    links = router(context, address, "a", "b")
    a, b, stranger = (dealer(context, address, name) for name in ("a", "b", "x"))
    stranger.send(FrontendHello(frontend_index=9))
    a.socket.send(b"garbage")
    a.socket.send_multipart([b"two", b"frames"])
    a.send(FrontendHello(frontend_index=0))
    b.send(FrontendHello(frontend_index=1))
    received = {}
    while len(received) < 2 or links.num_dropped < 3:
        assert links.socket.poll(2000), f"only {received}, {links.num_dropped} dropped"
        while (item := links.receive()) is not None:
            received[item[0]] = item[1]
    assert received == {"a": FrontendHello(frontend_index=0), "b": FrontendHello(frontend_index=1)}
    links.send("b", cancel(5))
    assert links.flush() == []
    assert b.socket.poll(2000)
    assert b.receive() == cancel(5)


def test_a_vanished_peer_is_reported_once(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path
) -> None:
    """Sending to a peer that is not there reports it lost; later messages to it are dropped."""
    links = router(context, f"ipc://{tmp_path}/s", "a")
    links.send("a", cancel(1))
    assert links.flush() == ["a"]
    links.send("a", cancel(2))
    assert links.flush() == []
    assert not links.has_pending


def test_a_slow_reader_loses_nothing(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path
) -> None:
    """More messages than the queues hold are kept in order and arrive when the peer reads."""
    address = f"ipc://{tmp_path}/s"
    links = router(context, address, "a")
    reader = dealer(context, address, "a")
    reader.send(FrontendHello(frontend_index=0))
    assert links.socket.poll(2000)
    links.receive()
    count = 20_000
    for key in range(count):
        links.send("a", cancel(key))
    links.flush()
    got = 0
    while got < count:
        links.flush()
        message = reader.receive()
        if message is None:
            assert reader.socket.poll(2000) or links.has_pending
            continue
        assert message == cancel(got)
        got += 1
