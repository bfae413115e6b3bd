"""Cores and memory, with and without the limits of a container."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cearx.core import machine


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up control group /a/b and a machine of 8 logical, 4 physical cores and 64 GiB."""
    group = tmp_path / "cgroup" / "a" / "b"
    group.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("1:cpu:/old\n0::/a/b\n")
    for number in range(8):
        topology = tmp_path / "cpu" / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(machine, "CGROUP_MEMBERSHIP", membership)
    monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "CPU_TOPOLOGY", tmp_path / "cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * 2**30))
    return group


def test_no_limits(container: Path) -> None:
    """Physical cores, not logical ones; what the system calls available."""
    assert machine.available_cores() == 4
    assert machine.free_memory() == 64 * 2**30


def test_affinity_counts(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of one core are one core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 2})
    assert machine.available_cores() == 2


def test_quota_and_memory_limit_of_any_group_above(container: Path) -> None:
    """The tightest limit on the way to the root holds; 'max' is none."""
    (container / "cpu.max").write_text("max 100000\n")
    (container.parent / "cpu.max").write_text("150000 100000\n")
    (container / "memory.max").write_text("max\n")
    (container / "memory.current").write_text("5\n")
    (container.parent / "memory.max").write_text(f"{3 * 2**30}\n")
    (container.parent / "memory.current").write_text(f"{2**30}\n")
    assert machine.available_cores() == 2
    assert machine.free_memory() == 2 * 2**30


def test_a_system_without_these_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything unknown is no limit."""
    for name in ("CGROUP_MEMBERSHIP", "CGROUP_ROOT", "CPU_TOPOLOGY"):
        monkeypatch.setattr(machine, name, tmp_path / "missing")
    assert machine.available_cores() == len(os.sched_getaffinity(0))
    assert machine.free_memory() > 0


def test_this_machine() -> None:
    """The real files can be read."""
    assert 1 <= machine.available_cores() <= len(os.sched_getaffinity(0))
    assert machine.free_memory() <= psutil.virtual_memory().total
