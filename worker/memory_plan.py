"""Where the worker's memory goes: sizes of the KV pool and of the longest request.

Owns the decision and the table that shows it; never allocates. Called once by the process, when
the weights are loaded. Sizes in bytes, lengths in tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cearx.core.child import StartupError
from cearx.core.config import WorkerConfig
from cearx.worker.kv_cache import block_bytes, blocks_that_fit
from cearx.worker.model_config import ModelConfig

LOGITS_BYTES = 4
"""Logits are float32 whatever the model's type."""


@dataclass(frozen=True)
class MemoryPlan:
    """What the process allocates and announces."""

    block_size: int
    num_blocks: int
    bytes_per_block: int
    max_model_len: int
    model_len_wanted: int
    """What max_model_len would be with enough memory."""
    max_num_batched_tokens: int
    weight_bytes: int
    activation_bytes: int
    """Estimated peak of a step."""
    free_bytes: int
    """After weights, KV pool and activations."""

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def plan_memory(
    config: WorkerConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    *,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    weight_bytes: int,
    free_bytes: int,
) -> MemoryPlan:
    """Sizes the pool; `free_bytes` is what is left with the weights loaded.

    Without max_model_len in the config it is the model's, reduced to what the pool holds. Raises
    StartupError with both sizes when a given length does not fit the model or the pool.
    """
    wanted = config.max_model_len or model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise StartupError(
            f"--max-model-len is {wanted}, the model has {model.max_position_embeddings} positions"
        )
    activations = activation_bytes(model, dtype, max_num_batched_tokens, max_num_seqs, wanted)
    bytes_per_block = block_bytes(model, block_size, dtype)
    blocks_wanted = -(-wanted // block_size)
    left_bytes = max(0, free_bytes - activations)
    num_blocks = blocks_that_fit(
        config, block_size, bytes_per_block, left_bytes, max_num_seqs * blocks_wanted
    )
    kv_bytes = num_blocks * bytes_per_block
    flag = "--kv-cache-memory" if config.num_kv_blocks is None else "--num-kv-blocks"
    if kv_bytes > left_bytes:
        raise StartupError(
            f"the KV pool of {size_text(kv_bytes)} does not fit the {size_text(left_bytes)} of "
            f"free memory beside weights and activations; lower {flag}"
        )
    if config.max_model_len is not None and num_blocks < blocks_wanted:
        needed = size_text(blocks_wanted * bytes_per_block)
        num_tokens = num_blocks * block_size
        raise StartupError(
            f"a request of --max-model-len {wanted} needs {needed} of KV, "
            f"the pool has {size_text(kv_bytes)} ({num_tokens} tokens); "
            f"lower --max-model-len or raise {flag}"
        )
    max_model_len = min(wanted, num_blocks * block_size)
    if max_model_len < 2:
        raise StartupError(
            f"the KV pool of {size_text(kv_bytes)} holds {max_model_len} token, a request needs 2; "
            f"raise {flag}"
        )
    return MemoryPlan(
        block_size=block_size,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        max_model_len=max_model_len,
        model_len_wanted=wanted,
        max_num_batched_tokens=max_num_batched_tokens,
        weight_bytes=weight_bytes,
        activation_bytes=activations,
        free_bytes=left_bytes - kv_bytes,
    )


def activation_bytes(
    model: ModelConfig,
    dtype: torch.dtype,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """An estimate of what the largest step needs beside weights and KV.

    Of a layer the wider half counts: the MLP has gate, up and product of each token; attention has
    q, k, v and the output, and the gathered keys and values of one request. The hidden state is
    there twice. Logits are those of one token a request, with the sampler's float64 row.
    """
    heads = model.num_heads + 2 * model.num_kv_heads
    mlp = 3 * model.intermediate_size
    attention = (heads + model.num_heads) * model.head_dim
    per_token = (2 * model.hidden_size + max(mlp, attention)) * dtype.itemsize
    gathered = 2 * model.num_kv_heads * model.head_dim * max_model_len * dtype.itemsize
    logits = model.vocab_size * (max_num_seqs * LOGITS_BYTES + 8)
    return max_num_batched_tokens * per_token + gathered + logits


def memory_table(plan: MemoryPlan) -> str:
    """The table that the person sees who started the server."""
    num_tokens = plan.num_blocks * plan.block_size
    lines = [
        ("weights", plan.weight_bytes, ""),
        (
            "KV cache",
            plan.kv_bytes,
            f"{plan.num_blocks:,} blocks of {plan.block_size} tokens x "
            f"{plan.bytes_per_block:,} bytes = {num_tokens:,} tokens",
        ),
        (
            "activations",
            plan.activation_bytes,
            f"estimated peak of a step of {plan.max_num_batched_tokens:,} tokens",
        ),
        ("free", plan.free_bytes, "after all of these"),
    ]
    table = [f"  {name:<12}{size_text(size):>14}  {note}".rstrip() for name, size, note in lines]
    length = f"  max_model_len {plan.max_model_len:,}"
    if plan.max_model_len < plan.model_len_wanted:
        length += f", reduced from {plan.model_len_wanted:,} to what the KV cache holds"
    return "\n".join(["memory", *table, length])


def weights_text(bytes_by_form: Mapping[str, int]) -> str:
    """How many bytes of weights are held as what, in a line."""
    parts = [f"{size_text(count)} as {form}" for form, count in bytes_by_form.items()]
    return f"weights: {size_text(sum(bytes_by_form.values()))}: {', '.join(parts)}"


def size_text(num_bytes: int) -> str:
    """A size for people."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:,.1f} KiB"
    return f"{num_bytes / 2**20:,.1f} MiB"
