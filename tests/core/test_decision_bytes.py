"""The same inputs give the same bytes of decisions in every process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import decision_bytes
import pytest
from decision_bytes import FaultyRun

from cearx.core.events import FinishReason

SCRIPT = Path(decision_bytes.__file__)
NUM_STEPS = 4_000
OTHER_PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")


def digests(
    *script: str, hash_seed: int, num_steps: int = NUM_STEPS, python: str = sys.executable
) -> str:
    """What the script prints in another process."""
    path = os.pathsep.join([str(SCRIPT.parents[2] / ".typing"), str(SCRIPT.parent)])
    done = subprocess.run(
        [python, *(script or [str(SCRIPT)]), "--steps", str(num_steps)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path},
    )
    return done.stdout


def other_python() -> str | None:
    """An interpreter of another version that has what the core needs."""
    for name in OTHER_PYTHONS:
        path = shutil.which(name)
        check = "import sys, msgspec, google_crc32c; print(sys.version_info[:2])"
        if path is not None:
            done = subprocess.run([path, "-c", check], capture_output=True, text=True, check=False)
            if done.returncode == 0 and done.stdout.strip() != str(sys.version_info[:2]):
                return path
    return None


def test_two_hash_seeds_decide_alike() -> None:
    """Equal digests of inputs, decisions and states; and every kind of fault was there."""
    printed = digests(hash_seed=1)
    assert digests(hash_seed=2) == printed
    run = FaultyRun(seed=0)
    part = 0
    while run.num_steps < NUM_STEPS:
        run.run_part(part)
        part += 1
    assert f"{run.num_steps} {run.digests.line()}" == printed.splitlines()[-2]
    assert all(run.counts.values()), run.summary()
    assert all(run.ends[reason] for reason in FinishReason), run.summary()


def test_another_python_decides_alike() -> None:
    """The bytes do not depend on the interpreter's version."""
    python = other_python()
    if python is None:
        pytest.skip("no other Python here has msgspec and google-crc32c")
    assert digests(hash_seed=3, python=python) == digests(hash_seed=4)


def test_a_policy_that_looks_at_hashes_is_noticed() -> None:
    """One decision that depends on the hash of a string gives every process other digests."""
    changed = (
        "import decision_bytes; from cearx.core import admission\n"
        "admission.POLICIES['forecast'] = lambda _, candidate: hash(f'{candidate}') % 4 > 0\n"
        "decision_bytes.main()"
    )
    one, other = (digests("-c", changed, hash_seed=seed, num_steps=400) for seed in (1, 2))
    assert one != other
    assert digests("-c", changed, hash_seed=1, num_steps=400) == one
