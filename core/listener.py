"""The listening socket: TCP or unix, bound before anything slow, shared by all frontends.

Owns its creation and removal, and the address that people are told. Called by `supervisor.py`.
"""

import contextlib
import ipaddress
import os
import resource
import socket
import stat
from pathlib import Path
from typing import Any

from cearx.core.config import ServerConfig

BACKLOG = 4096
"""Connections that may wait to be accepted: a burst must not be refused."""

MAX_UNIX_PATH_BYTES = 107
PROBE_S = 1.0
MAX_OPEN_FILES = 65_536


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


def allow_many_connections() -> None:
    """Raises this process's limit of open files, which its children inherit, as far as it may.

    The usual 1,024 are less than the slow clients whom a server of long streams has to bear.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def close(listener: socket.socket, config: ServerConfig) -> None:
    """Call it when no child listens any more: then only another server's socket is served."""
    listener.close()
    if config.uds is not None:
        with contextlib.suppress(OSError):
            if not _is_served(config.uds):
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
    return _bound(listener, address)


def _bound(listener: socket.socket, address: Any) -> socket.socket:
    try:
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_unix(path: Path) -> socket.socket:
    """In place of a socket that nobody serves any more, never of another file."""
    size = len(os.fsencode(path))
    if size > MAX_UNIX_PATH_BYTES:
        raise OSError(
            f"the path of a unix socket may have {MAX_UNIX_PATH_BYTES} bytes, this one has {size}"
        )
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _is_served(path):
        path.unlink()
    return _bound(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(path))


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except (TimeoutError, BlockingIOError):  # so many connections wait that there is no room
            return True
        return True
