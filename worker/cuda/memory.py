"""Where the GPU's memory goes: what is measured at start, and the KV pool that the rest allows.

Owns the arithmetic and the table that shows it; measuring is `start.py`'s. Sizes in bytes, lengths
in tokens.
"""

from dataclasses import dataclass

from cearx.core.child import StartupError
from cearx.core.config import WorkerConfig
from cearx.worker.memory_plan import size_text

GRAPH_MARGIN = 1.25
"""Graphs of other sizes may need more than those that were captured for trial."""
RESERVE_BYTES = 256 * 2**20
"""Left free for what libraries allocate later, such as handles and module code."""


@dataclass(frozen=True)
class Measured:
    """What start-up found before the KV pool was allocated."""

    total_bytes: int
    """Of the GPU."""
    used_bytes: int
    """By everybody, this process's weights and buffers included."""
    weight_bytes: int
    buffer_bytes: int
    """Of the workspace and all else that lives as long as the process."""
    activation_bytes: int
    """What the largest step took beside them, at its peak."""
    graph_bytes: int
    """Expected for all graphs."""


@dataclass(frozen=True)
class CudaMemoryPlan:
    measured: Measured
    block_size: int
    num_blocks: int
    bytes_per_block: int
    max_model_len: int
    model_len_wanted: int
    budget_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def plan_cuda_memory(
    config: WorkerConfig,
    measured: Measured,
    *,
    block_size: int,
    bytes_per_block: int,
    max_num_seqs: int,
    model_len_wanted: int,
) -> CudaMemoryPlan:
    """Sizes the pool; raises StartupError with both sizes for what does not fit."""
    budget = int(measured.total_bytes * config.gpu_memory_utilization)
    needed = measured.used_bytes + measured.activation_bytes + measured.graph_bytes + RESERVE_BYTES
    left = max(0, budget - needed)
    blocks_each = -(-model_len_wanted // block_size)
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    else:
        # One block more is allocated, for padded rows.
        wanted = left - bytes_per_block
        if config.kv_cache_memory is not None:
            wanted = config.kv_cache_memory
        num_blocks = min(wanted // bytes_per_block, max_num_seqs * blocks_each)
    kv_bytes = (num_blocks + 1) * bytes_per_block
    if num_blocks < 1 or kv_bytes > left:
        raise StartupError(
            f"a KV pool of {size_text(max(1, num_blocks) * bytes_per_block)} does not fit the "
            f"{size_text(left)} that --gpu-memory-utilization {config.gpu_memory_utilization} of "
            f"{size_text(measured.total_bytes)} leaves beside {size_text(needed)} in use"
        )
    if config.max_model_len is not None and num_blocks < blocks_each:
        raise StartupError(
            f"a request of --max-model-len {model_len_wanted} needs "
            f"{size_text(blocks_each * bytes_per_block)} of KV, the pool has "
            f"{size_text(num_blocks * bytes_per_block)} ({num_blocks * block_size} tokens)"
        )
    return CudaMemoryPlan(
        measured=measured,
        block_size=block_size,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        max_model_len=min(model_len_wanted, num_blocks * block_size),
        model_len_wanted=model_len_wanted,
        budget_bytes=budget,
    )


def cuda_memory_table(plan: CudaMemoryPlan, graph_bytes: int, free_bytes: int) -> str:
    """The table that the person sees who started the server; graphs and free as they came out."""
    num_tokens = plan.num_blocks * plan.block_size
    measured = plan.measured
    lines = [
        ("weights", measured.weight_bytes, ""),
        (
            "KV cache",
            plan.kv_bytes,
            f"{plan.num_blocks:,} blocks of {plan.block_size} tokens x "
            f"{plan.bytes_per_block:,} bytes = {num_tokens:,} tokens",
        ),
        ("buffers", measured.buffer_bytes, "of the largest step, allocated once"),
        ("activations", measured.activation_bytes, "measured peak beside them"),
        ("graphs", graph_bytes, "measured"),
        ("free", free_bytes, f"of {size_text(measured.total_bytes)}"),
    ]
    table = [f"  {name:<12}{size_text(size):>14}  {note}".rstrip() for name, size, note in lines]
    length = f"  max_model_len {plan.max_model_len:,}"
    if plan.max_model_len < plan.model_len_wanted:
        length += f", reduced from {plan.model_len_wanted:,} to what the KV cache holds"
    return "\n".join(["GPU memory", *table, length])
