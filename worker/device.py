"""Which device the worker computes on, and the sizes that suit it where no flag says them.

Owns the defaults of both devices; never allocates. Called once at start by the process.
"""

from dataclasses import dataclass

import torch

from cearx.core.child import StartupError
from cearx.core.config import WorkerConfig, WorkerLaunch

CUDA_BLOCK_SIZES = (16, 32, 64, 128, 256)
FP8_CAPABILITY = (8, 9)
"""Of the first GPUs that convert 8-bit floats."""


@dataclass(frozen=True)
class StepSizes:
    """What every buffer of the worker is sized by."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


DEFAULTS = {
    "cpu": StepSizes(block_size=16, max_num_seqs=64, max_num_batched_tokens=2048),
    # A prompt of 4,096 tokens beside 256 decodes: products are as fast at that size as at more,
    # and the first tokens of a burst come after its first step instead of after all of it.
    "cuda": StepSizes(block_size=64, max_num_seqs=256, max_num_batched_tokens=4352),
}


def choose_device(config: WorkerConfig) -> torch.device:
    """The device that the flag names; raises StartupError for a GPU that is not there.

    Raises StartupError as well for a flag that the device which 'auto' finds does not have.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        if config.quantization == "int8":
            raise StartupError(
                "--quantization int8 is for the CPU and this machine has a GPU: add --device cpu"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        if config.quantization == "fp8":
            _check_fp8("--quantization fp8", device)
        if config.kv_cache_dtype.startswith("fp8"):
            _check_fp8(f"--kv-cache-dtype {config.kv_cache_dtype}", device)
        return device
    if config.device == "cuda":
        raise StartupError(
            f"--device cuda: PyTorch {torch.__version__} finds no CUDA device; use --device cpu"
        )
    if config.quantization == "fp8":
        raise StartupError(
            f"--quantization fp8 needs a GPU, and PyTorch {torch.__version__} finds none; "
            "for the CPU there is int8"
        )
    return torch.device("cpu")


def _check_fp8(flag: str, device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise StartupError(
            f"{flag} needs a GPU of compute capability {FP8_CAPABILITY[0]}."
            f"{FP8_CAPABILITY[1]}, this one has {capability[0]}.{capability[1]}"
        )


def choose_sizes(spec: WorkerLaunch, device: torch.device) -> StepSizes:
    """The flags' sizes, else the device's; of two that must fit, the one not given gives way.

    Raises StartupError for a block size that the device's kernels do not have.
    """
    defaults = DEFAULTS[device.type]
    block_size = spec.config.block_size or defaults.block_size
    if device.type == "cuda" and block_size not in CUDA_BLOCK_SIZES:
        sizes = ", ".join(map(str, CUDA_BLOCK_SIZES))
        raise StartupError(f"--block-size on CUDA must be one of {sizes}, got {block_size}")
    max_num_batched_tokens = spec.max_num_batched_tokens or max(
        defaults.max_num_batched_tokens, spec.max_num_seqs or 0
    )
    max_num_seqs = spec.max_num_seqs or min(defaults.max_num_seqs, max_num_batched_tokens)
    return StepSizes(block_size, max_num_seqs, max_num_batched_tokens)
