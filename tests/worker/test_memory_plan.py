"""Sizes of the KV pool and of the longest request, and what does not fit."""

from typing import Any

import pytest
import torch

from cearx.core.child import StartupError
from cearx.core.config import WorkerConfig
from cearx.worker.memory_plan import MemoryPlan, activation_bytes, memory_table, plan_memory
from cearx.worker.model_config import ModelConfig, RopeConfig

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=1000,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    tie_word_embeddings=True,
)
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4
BLOCK_BYTES = 16 * TOKEN_BYTES
ACTIVATIONS = activation_bytes(MODEL, torch.float32, 256, 4, 512)


def plan(free_bytes: int, max_num_seqs: int = 4, **flags: Any) -> MemoryPlan:
    """A plan for MODEL in float32."""
    return plan_memory(
        WorkerConfig(**flags),
        MODEL,
        torch.float32,
        block_size=flags.get("block_size", 16),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=256,
        weight_bytes=12_345_678,
        free_bytes=free_bytes,
    )


def test_plenty_of_memory_takes_what_all_requests_can_fill_and_no_more() -> None:
    """The pool is capped at max_num_seqs requests of max_model_len."""
    sized = plan(2**34)
    assert (sized.num_blocks, sized.max_model_len) == (4 * 512 // 16, 512)
    assert sized.kv_bytes == 128 * BLOCK_BYTES
    assert sized.free_bytes == 2**34 - ACTIVATIONS - sized.kv_bytes


def test_a_share_of_the_free_memory() -> None:
    """The default pool is the fraction of what activations leave, in whole blocks."""
    sized = plan(ACTIVATIONS + 100 * BLOCK_BYTES, kv_cache_memory_fraction=0.5)
    assert (sized.num_blocks, sized.max_model_len) == (50, 512)


def test_given_bytes() -> None:
    """--kv-cache-memory counts in whole blocks, rounded down."""
    assert plan(2**34, kv_cache_memory=41 * BLOCK_BYTES - 1).num_blocks == 40


@pytest.mark.parametrize("num_blocks", [7, 128, 1000])
def test_given_blocks(num_blocks: int) -> None:
    """--num-kv-blocks is exact, whatever the share of memory and the use of all requests say."""
    sized = plan(2**34, num_kv_blocks=num_blocks, kv_cache_memory_fraction=1e-6)
    assert sized.num_blocks == num_blocks
    assert sized.max_model_len == min(512, num_blocks * 16)


def test_the_length_is_reduced_to_the_pool_and_the_table_says_so() -> None:
    """Without --max-model-len a small pool shortens requests instead of failing."""
    sized = plan(2**34, kv_cache_memory=5 * BLOCK_BYTES)
    assert (sized.num_blocks, sized.max_model_len) == (5, 80)
    table = memory_table(sized)
    assert "max_model_len 80, reduced from 512" in table
    assert "5 blocks of 16 tokens x 12,288 bytes = 80 tokens" in table
    assert "weights" in table and "11.8 MiB" in table
    assert "reduced" not in memory_table(plan(2**34))


@pytest.mark.parametrize(
    ("flags", "free_bytes", "message"),
    [
        (
            {"max_model_len": 100, "kv_cache_memory": 6 * BLOCK_BYTES},
            2**34,
            "--max-model-len 100 needs 84.0 KiB of KV, the pool has 72.0 KiB .96 tokens.",
        ),
        ({"max_model_len": 513}, 2**34, "--max-model-len is 513, the model has 512 positions"),
        (
            {"kv_cache_memory": 90 * BLOCK_BYTES},
            ACTIVATIONS + 80 * BLOCK_BYTES,
            "KV pool of 1.1 MiB does not fit the 960.0 KiB",
        ),
        (
            {"num_kv_blocks": 90},
            ACTIVATIONS + 80 * BLOCK_BYTES,
            "KV pool of 1.1 MiB does not fit the 960.0 KiB .*lower --num-kv-blocks",
        ),
        (
            {"max_model_len": 100, "num_kv_blocks": 6},
            2**34,
            "needs 84.0 KiB of KV, the pool has 72.0 KiB .96 tokens.; .* raise --num-kv-blocks",
        ),
        ({"num_kv_blocks": 1, "block_size": 1}, 2**34, "holds 1 token.* raise --num-kv-blocks"),
        ({"kv_cache_memory": BLOCK_BYTES - 1}, 2**34, f"needs {BLOCK_BYTES}"),
        ({}, ACTIVATIONS, f"needs {BLOCK_BYTES}"),
        ({"kv_cache_memory": TOKEN_BYTES, "block_size": 1}, 2**34, "holds 1 token"),
    ],
)
def test_what_does_not_fit_is_told_with_both_sizes(
    flags: dict[str, Any], free_bytes: int, message: str
) -> None:
    """Each is one StartupError line that names a flag or the sizes."""
    with pytest.raises(StartupError, match=message) as caught:
        plan(free_bytes, **flags)
    assert "\n" not in str(caught.value)


def test_a_given_length_that_just_fits() -> None:
    """The blocks of exactly one request are enough."""
    sized = plan(2**34, max_model_len=96, kv_cache_memory=6 * BLOCK_BYTES)
    assert (sized.num_blocks, sized.max_model_len) == (6, 96)
