"""Links to several named peers over one ROUTER socket: core to frontends, supervisor to children.

A peer sets its name as ZeroMQ identity before it connects; frames of anyone else are counted. Never
blocks: what a peer cannot take yet is kept in order. A peer that is gone, or has not read for
MAX_PENDING messages, is reported as lost, once.
"""

from collections import deque
from collections.abc import Iterable
from typing import Generic

import zmq

from cearx.core.link import MAX_PENDING, RECEIVE, SEND, Channel, configure


class _Peer(Generic[SEND, RECEIVE]):
    def __init__(self, channel: Channel[SEND, RECEIVE]) -> None:
        self.channel = channel
        self.pending: deque[bytes] = deque()
        self.is_lost = False


class RouterLinks(Generic[SEND, RECEIVE]):
    """One channel for each of `names`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        boot_id: int,
        names: Iterable[str],
        receive_type: type[RECEIVE] | object,
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        configure(self.socket)
        self.socket.bind(address)
        self.num_unknown = 0
        """Frames of no known peer, or of a wrong shape."""
        self._peers: dict[bytes, _Peer[SEND, RECEIVE]] = {
            name.encode(): _Peer(Channel(boot_id, 0, receive_type)) for name in names
        }

    def receive(self) -> tuple[str, RECEIVE] | None:
        """The next good message with its sender's name, or None when none has arrived."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            peer = self._peers.get(frames[0])
            if peer is None or len(frames) != 2:
                self.num_unknown += 1
                continue
            message = peer.channel.decode(frames[1])
            if message is not None:
                return frames[0].decode(), message

    def send(self, name: str, message: SEND) -> None:
        """Keeps the message for `flush`; drops it when the peer is lost."""
        peer = self._peers[name.encode()]
        if not peer.is_lost:
            peer.pending.append(peer.channel.encode(message))

    def flush(self) -> list[str]:
        """Sends what can be sent; answers the peers that were found lost in this call."""
        lost: list[str] = []
        for identity, peer in self._peers.items():
            while peer.pending and not peer.is_lost:
                try:
                    self.socket.send_multipart((identity, peer.pending[0]), zmq.NOBLOCK)
                except zmq.Again:
                    peer.is_lost = len(peer.pending) > MAX_PENDING
                    break
                except zmq.ZMQError as error:
                    if error.errno != zmq.EHOSTUNREACH:
                        raise
                    peer.is_lost = True
                else:
                    peer.pending.popleft()
            if peer.is_lost and peer.pending:
                peer.pending.clear()
                lost.append(identity.decode())
        return lost

    @property
    def has_pending(self) -> bool:
        return any(peer.pending for peer in self._peers.values())

    @property
    def num_dropped(self) -> int:
        """Frames that were dropped for any reason; a rising number is a fault of a peer."""
        counters = [peer.channel.counters for peer in self._peers.values()]
        return self.num_unknown + sum(c.malformed + c.foreign + c.stale for c in counters)
