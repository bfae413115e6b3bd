"""hypercorn, configured for long streams on a socket that the supervisor opened.

Its defaults are made for short answers: they cut keep-alive connections after 1,000 requests or 5
seconds and limit how fast new ones come in. Called by `process.py`.
"""

import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import cast

from hypercorn.asyncio import run, serve, tcp_server
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Event, Updated
from hypercorn.typing import ASGIFramework
from starlette.types import ASGIApp

from cearx.core.config import FrontendConfig
from cearx.frontend.http_protocol import HTTP1, ServerConfig
from cearx.frontend.read_ahead import PeerGone, ReadAhead

BACKLOG = 4096
KEEP_ALIVE_S = 75.0
GRACEFUL_S = 2.0
"""For the last bytes of streams that were ended; nothing is generated any more."""
TCP_USER_TIMEOUT_MS = 60_000
"""The kernel drops a connection whose peer takes nothing for so long: closing one flushes it."""


class Connection(TCPServer):
    """hypercorn's, but closed as soon as the peer has closed it and nothing is answered any more.

    hypercorn waits for its idle timer even then, so that each client that comes for one request
    would hold a file descriptor for KEEP_ALIVE_S.
    """

    async def _read_data(self) -> None:
        assert isinstance(self.protocol, HTTP1), "`serve_http` has put it in hypercorn's place"
        self.protocol.can_read = ReadAhead(self.reader, self.protocol)
        with contextlib.suppress(PeerGone):
            await super()._read_data()
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated) and event.idle and self.reader.at_eof():
            return  # no next request will come
        await super().protocol_send(event)


def hypercorn_config(listen_fd: int, flags: FrontendConfig) -> ServerConfig:
    config = ServerConfig()
    if flags.ssl_certfile is not None:
        config.certfile = str(flags.ssl_certfile)
        config.keyfile = str(flags.ssl_keyfile)
        config.alpn_protocols = ["http/1.1"]
    config.bind = [f"fd://{listen_fd}"]
    config.backlog = BACKLOG
    config.graceful_timeout = GRACEFUL_S
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 1_000_000_000
    config.h11_max_incomplete_size = flags.max_header_bytes
    config.request_read_timeout_s = flags.request_read_timeout
    config.ssl_handshake_timeout = flags.request_read_timeout
    config.max_app_queue_size = 64
    config.accesslog = None
    config.errorlog = "-"
    config.loglevel = "WARNING"
    config.include_server_header = False
    return config


async def serve_http(
    app: ASGIApp,
    listen_fd: int,
    flags: FrontendConfig,
    run_until_end: Callable[[], Awaitable[None]],
) -> None:
    """Serves until `run_until_end` returns; it is called when connections are accepted."""
    _drop_stuck_peers(listen_fd)
    # Starlette types ASGI messages as mappings, hypercorn as one TypedDict a kind.
    asgi_app = cast(ASGIFramework, app)
    config = hypercorn_config(listen_fd, flags)
    # hypercorn has no settings for these.
    run.TCPServer = Connection  # type: ignore[attr-defined]
    tcp_server.ProtocolWrapper = HTTP1  # type: ignore[assignment, attr-defined]
    await serve(asgi_app, config, shutdown_trigger=run_until_end, mode="asgi")


def _drop_stuck_peers(listen_fd: int) -> None:
    """Accepted connections inherit the option."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not TCP
        listener = socket.socket(fileno=listen_fd)
        try:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
        finally:
            listener.detach()
