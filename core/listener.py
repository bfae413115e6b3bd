"""The listening socket: TCP or unix, bound before anything slow, shared by all frontends.

Owns its creation and removal, and the address that people are told. Called by `supervisor.py`.
"""

import contextlib
import ipaddress
import socket
import ssl
import stat
from pathlib import Path

from cearx.core.config import FrontendConfig, ServerConfig

BACKLOG = 4096
"""Connections that may wait to be accepted: a burst must not be refused."""


class CannotListen(Exception):
    """One clear line why there is no socket."""


def listen(config: ServerConfig) -> socket.socket:
    """Raises CannotListen."""
    try:
        listener = _bind_tcp(config) if config.uds is None else _bind_unix(config.uds)
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as error:  # the latter for what can be no host name
        where = f"{config.host}:{config.port}" if config.uds is None else str(config.uds)
        reason = getattr(error, "strerror", None) or str(error)
        raise CannotListen(f"cannot listen on {where}: {reason}") from error
    listener.set_inheritable(True)
    return listener


def check_certificate(config: FrontendConfig) -> None:
    """Raises CannotListen for files that TLS cannot use."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # ssl.SSLError is one
        files = f"{config.ssl_certfile} and {config.ssl_keyfile}"
        raise CannotListen(f"TLS cannot use {files}: {error}") from error


def close(listener: socket.socket, config: ServerConfig) -> None:
    listener.close()
    if config.uds is not None:
        with contextlib.suppress(OSError):
            config.uds.unlink()


def url(listener: socket.socket, scheme: str) -> str:
    """Where clients reach it."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def public_host(listener: socket.socket) -> str | None:
    """The address, if others than this machine's users can reach it."""
    if listener.family == socket.AF_UNIX:
        return None
    host: str = listener.getsockname()[0]
    return None if ipaddress.ip_address(host).is_loopback else host


def _bind_tcp(config: ServerConfig) -> socket.socket:
    family, _type, _protocol, _name, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    return listener


def _bind_unix(path: Path) -> socket.socket:
    """In place of a socket that nobody serves any more, never of another file."""
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _is_served(path):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True
