"""The server that the tests of this folder share."""

from collections.abc import Iterator

import pytest
from server_process import Server, replay, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that tests share; its whole trace must replay at the end."""
    trace = tmp_path_factory.mktemp("trace")
    with serving("--enable-prompt-tokens-details", trace=trace) as started:
        yield started
        assert started.stop() == 0
    done = replay(started.trace_log)
    assert done.returncode == 0, done.stdout + done.stderr
