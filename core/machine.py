"""What this process may use of the machine: cores and memory, with the limits of its container.

Owns the reading of /proc and /sys; never sets anything. Called once at start by the supervisor and
the worker. What a system does not tell (no Linux, no control group) is simply no further limit.
"""

import contextlib
import os
from pathlib import Path

import psutil

CPU_TOPOLOGY = Path("/sys/devices/system/cpu")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Physical cores among the logical ones that this process may run on, at least 1."""
    logical = os.sched_getaffinity(0)
    cores = set()
    for number in logical:
        try:
            siblings = CPU_TOPOLOGY / f"cpu{number}" / "topology" / "thread_siblings_list"
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(number))
    return max(1, min(len(cores), _cgroup_cores() or len(cores)))


def free_memory() -> int:
    """Bytes that can be allocated without swapping or hitting the container's limit."""
    free = psutil.virtual_memory().available
    for group in _cgroups():
        with contextlib.suppress(OSError, ValueError):  # "max" is no number and no limit
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            free = min(free, max(0, limit - used))
    return free


def _cgroup_cores() -> int | None:
    """Whole cores of the smallest CPU quota, rounded up; None without a quota."""
    smallest = None
    for group in _cgroups():
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, (group / "cpu.max").read_text().split())
            cores = max(1, -(-quota // period))
            smallest = cores if smallest is None else min(smallest, cores)
    return smallest


def _cgroups() -> list[Path]:
    """This process's control group (version 2) and all above it."""
    try:
        lines = CGROUP_MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    group = CGROUP_ROOT / own.lstrip("/")
    return [group, *(parent for parent in group.parents if parent.is_relative_to(CGROUP_ROOT))]
