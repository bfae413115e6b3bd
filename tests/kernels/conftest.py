"""Where the kernels of these tests run: on the GPU if there is one, else in Triton's interpreter.

The choice must stand in the environment before the first kernel module is imported, and pytest
imports this file before the test modules beside it.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors of a kernel test live."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def on_gpu(device: torch.device) -> bool:
    """Whether kernels are compiled: then sizes can be large and bfloat16 is right."""
    return device.type == "cuda"
