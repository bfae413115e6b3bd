"""Compiled CPU kernels on disk: taken up again, and never for another processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CALL = """
import numpy as np
from cearx.kernels.panel_product import exp
from cearx.kernels.panels import ROWS
exp(np.float32(1.0))
print(sum(exp.stats.cache_hits.values()), sum(exp.stats.cache_misses.values()), ROWS)
"""
AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+avx,+fma,+sse4.2,+sse2"}


def call(cache: Path, **settings: str) -> tuple[int, int, int]:
    """Hits and misses of one kernel in a process of its own, and the rows that it multiplies."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", CALL],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    hits, misses, rows = map(int, done.stdout.split())
    return hits, misses, rows


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names processors of one architecture")
def test_code_is_kept_for_one_processor(tmp_path: Path) -> None:
    """One folder serves machines of several kinds: each finds what was compiled for its own."""
    plain = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}
    assert call(tmp_path, **AVX2) == (0, 1, 3)
    assert call(tmp_path, **AVX2) == (1, 0, 3)
    assert call(tmp_path, **plain) == (0, 1, 3)
    assert call(tmp_path, **{**AVX2, "NUMBA_CPU_NAME": "skylake"}) == (0, 1, 3)
    assert call(tmp_path, **AVX2) == (1, 0, 3)
