"""The memory of keys and values: one tensor a layer, divided into blocks of tokens.

Owns allocation and the arithmetic of sizes; never decides who gets a block (the core does) and
never computes attention. The worker's process sizes and creates it once, models write and read it.

B blocks, S slots (block * block_size + offset), H 2 * num_kv_heads (keys, then values), D head_dim.
"""

import torch
from torch import Tensor

from cearx.core.child import StartupError
from cearx.core.config import WorkerConfig
from cearx.worker.model_config import ModelConfig

KV_TYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""What --kv-cache-dtype may name beside 'auto'."""


def kv_type(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Type of keys and values of a model that computes in `dtype`.

    Raises StartupError for one that no kernel of the device reads.
    """
    wanted = KV_TYPES.get(name, dtype)
    if wanted == torch.float8_e4m3fn and device.type == "cpu":
        raise StartupError(f"--kv-cache-dtype {name} needs a GPU; on the CPU there is auto")
    if wanted not in (dtype, torch.float8_e4m3fn):
        raise StartupError(
            f"--kv-cache-dtype {name} for a model that computes in "
            f"{str(dtype).removeprefix('torch.')}: keys and values have the model's type, or fp8"
        )
    return wanted


class KVCache:
    """Blocks of all layers. Memory is uninitialised: nothing reads a slot before it was written."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        num_kv_heads: int | None = None,
    ) -> None:
        """`num_kv_heads` is this rank's share; None: all of the model's."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        num_heads = 2 * (num_kv_heads or config.num_kv_heads)
        self.layers_SHD: list[Tensor] = [
            torch.empty(num_blocks * block_size, num_heads, config.head_dim, dtype=dtype)
            for _ in range(config.num_layers)
        ]


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values together."""
    values_per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim
    return block_size * values_per_token * dtype.itemsize


def blocks_that_fit(
    worker: WorkerConfig,
    block_size: int,
    bytes_per_block: int,
    free_bytes: int,
    max_useful_blocks: int,
) -> int:
    """Blocks in the pool: as many as given, or of the given memory or the share of `free_bytes`.

    Those from memory are at most `max_useful_blocks`, what all requests together can ever fill.
    Raises StartupError when not a single block fits.
    """
    if worker.num_kv_blocks is not None:
        return worker.num_kv_blocks
    budget = worker.kv_cache_memory
    if budget is None:
        budget = int(free_bytes * worker.kv_cache_memory_fraction)
    num_blocks = min(budget // bytes_per_block, max_useful_blocks)
    if num_blocks < 1:
        raise StartupError(
            f"the KV pool has {budget} bytes, one block of {block_size} tokens needs "
            f"{bytes_per_block}; raise --kv-cache-memory or lower --block-size"
        )
    return num_blocks
