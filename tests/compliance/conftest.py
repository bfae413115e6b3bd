"""The server that the scripts of official clients share."""

from collections.abc import Iterator

import pytest
from server_process import Server, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The default model, as a person starts it."""
    with serving() as started:
        yield started
        assert started.stop() == 0
