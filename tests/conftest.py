"""Options of the whole suite."""

import os
from pathlib import Path

import hypothesis
import pytest

from cearx.core import trace_disk

hypothesis.settings.register_profile("default", deadline=None)  # a busy machine is no fault
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

if not Path("/dev/nvidia0").exists():
    # Kernels run in Triton's interpreter; it decides when it is imported, which many libraries do.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write golden files anew, for review in git"
    )
    parser.addoption(
        "--update-gates", action="store_true", help="store the performance ratios measured now"
    )
    parser.addoption(
        "--machine-steps",
        type=int,
        default=20_000,
        help="rules that the scheduler's state machine runs at least",
    )
    parser.addoption(
        "--liveness-seeds",
        type=int,
        nargs=2,
        default=(0, 200),
        metavar=("FIRST", "END"),
        help="random runs with faults and then quiet in which everybody has to end",
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(autouse=True)
def no_disk_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not move the trace's writes to a thread in the middle of a test."""
    monkeypatch.setattr(trace_disk, "SLOW_WRITE_NS", 10**18)
