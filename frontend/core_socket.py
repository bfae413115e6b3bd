"""The frontend's socket to the core, driven by the event loop.

Owns the DEALER socket, its readiness and the notice that the core is gone; knows nothing of
requests. ZeroMQ signals through an edge-triggered descriptor, so every wake-up goes on until
nothing can be read or sent, and every send is followed by one. Called by `engine_client.py`.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from cearx.core.child import endpoint
from cearx.core.link import Channel, DealerLink, PeerLost, configure
from cearx.core.messages import CoreToFrontend, FrontendHello, FrontendToCore

MESSAGES_PER_WAKEUP = 16
"""Read at most so many before other tasks run again."""


class CoreSocket:
    """Create it inside the running loop that drives it; `close` ends it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        runtime_dir: Path,
        boot_id: int,
        frontend_index: int,
        on_message: Callable[[CoreToFrontend], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_lost = on_lost
        self._pump_is_due = False
        self._socket = context.socket(zmq.DEALER)
        configure(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, b"frontend-%d" % frontend_index)
        self._link: DealerLink[FrontendToCore, CoreToFrontend] = DealerLink(
            self._socket, Channel(boot_id, 0, CoreToFrontend)
        )
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._loop.add_reader(self._monitor.fileno(), self._read_monitor)
        self._read_monitor()  # the descriptor signals only after a first look
        self._loop.add_reader(self._socket.fileno(), self._pump)
        self._socket.connect(endpoint(runtime_dir, "frontends"))
        self.send(FrontendHello(frontend_index=frontend_index))

    def send(self, message: FrontendToCore) -> None:
        """Sends or keeps until the core can take it; never blocks, never raises."""
        try:
            self._link.send(message)
        except PeerLost:
            self._on_lost()
        if not self._pump_is_due:
            self._pump_is_due = True
            self._loop.call_soon(self._pump)

    def close(self) -> None:
        """Pending messages get LINGER_MS to leave."""
        if not self._socket.closed:
            self._loop.remove_reader(self._monitor.fileno())
            self._loop.remove_reader(self._socket.fileno())
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close()

    def _pump(self) -> None:
        self._pump_is_due = False
        if self._socket.closed:
            return
        for _ in range(MESSAGES_PER_WAKEUP):
            self._link.flush()
            message = self._link.receive()
            if message is not None:
                self._on_message(message)
            elif not self._can_go_on():
                return
        self._pump_is_due = True
        self._loop.call_soon(self._pump)

    def _can_go_on(self) -> bool:
        """Asked last: any other call may use up the descriptor's signal for the other direction."""
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int), f"EVENTS is {events!r}"
        return bool(events & zmq.POLLIN or (events & zmq.POLLOUT and self._link.has_pending))

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                self._on_lost()
                return
