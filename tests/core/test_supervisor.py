"""What the supervisor decides by itself; its processes are tested end to end."""

import pytest

from cearx.core.config import ServerConfig
from cearx.core.supervisor import num_frontends


@pytest.mark.parametrize(
    ("num_cores", "expected"),
    [(1, 1), (2, 1), (7, 1), (8, 2), (15, 3), (16, 4), (19, 4), (128, 4)],
)
def test_a_frontend_for_every_four_cores(num_cores: int, expected: int) -> None:
    """At least one, at most four; the person's own number goes before that."""
    assert num_frontends(ServerConfig(), num_cores) == expected
    assert num_frontends(ServerConfig(frontends=3), num_cores) == 3
