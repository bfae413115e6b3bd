"""The API keys that a server was given: from flags, a file and the environment, to digests.

Owns where keys come from and what a key may be. The keys themselves stay in the supervisor; the
frontends get digests. Called by `supervisor.py`.
"""

import hashlib
from collections.abc import Mapping

from cearx.core.config import ServerConfig

VARIABLE = "CEARX_API_KEY"
"""The one setting that is read from the environment, so that a secret need not stand in a command
line, where every user of the machine can read it."""


def key_digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def api_key_digests(config: ServerConfig, environment: Mapping[str, str]) -> tuple[bytes, ...]:
    """Of all keys, each once; raises ValueError for a key or a file that cannot be used."""
    keys = list(config.api_key)
    if VARIABLE in environment:
        keys.append(environment[VARIABLE])
    if config.api_key_file is not None:
        keys += _read(config)
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            # The key is not shown: it may be right but for one character.
            raise ValueError(
                "an API key must be printable ASCII characters without spaces, at least one; "
                f"got one of {len(key)} characters that is not"
            )
    return tuple(dict.fromkeys(key_digest(key.encode()) for key in keys))


def _read(config: ServerConfig) -> list[str]:
    path = config.api_key_file
    assert path is not None, "there is no file"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {path} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:  # an empty file must not open the server to everybody
        raise ValueError(f"--api-key-file {path} holds no key")
    return keys
