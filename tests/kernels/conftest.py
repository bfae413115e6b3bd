"""Kernels of these tests run on the GPU if there is one, else in Triton's interpreter."""

import os

import pytest
import torch
from triton_interpreter import mend_fp8_casts, mend_loop_bounds

if os.environ.get("TRITON_INTERPRET") == "1":
    mend_fp8_casts()
    mend_loop_bounds()


@pytest.fixture(scope="session")
def device(on_gpu: bool) -> torch.device:
    """Where tensors of a kernel test live."""
    return torch.device("cuda" if on_gpu else "cpu")


@pytest.fixture(scope="session")
def on_gpu() -> bool:
    """Whether kernels are compiled: then sizes can be large and bfloat16 is right."""
    return os.environ.get("TRITON_INTERPRET") != "1"
