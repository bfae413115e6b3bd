"""Tiny random transformers models in which mistakes show, and their folders on disk.

Default initialisation is blind: logits barely depend on positions, norms or the KV cache. Here
weights are large, norms and biases are perturbed and embeddings have a realistic scale, so that
a dropped norm or a lost key moves the logits by far more than rounding does.
"""

from copy import deepcopy
from functools import cache
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, object]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}


@cache
def tiny_model(
    family: str,
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    tied: bool = False,
    num_layers: int = 2,
    vocab_size: int = 301,
    max_positions: int = 1024,
    rope: tuple[tuple[str, object], ...] = (("rope_type", "default"), ("rope_theta", 10_000.0)),
    seed: int = 0,
) -> PreTrainedModel:
    """A float32 model of a family of FAMILIES; hidden size is num_heads * 16 except for Qwen2."""
    config_type, model_type, options = FAMILIES[family]
    hidden_size = num_heads * (head_dim if family == "qwen2" else 16)
    config = config_type(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size + 8,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        initializer_range=0.15,
        rope_parameters=dict(rope),
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **options,
    )
    torch.manual_seed(seed)
    model = model_type(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if "q_norm" in name or "k_norm" in name:
                parameter.mul_(1.5)  # sharper attention, so that one lost key shows
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            if "embed_tokens" in name:
                parameter.mul_(0.5 / parameter.std())
    return model


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of one whole sequence, computed without a cache.

    A float32 model computes in float64: its own rounding is as large as that of the tested one.
    """
    exact = deepcopy(model).double() if model.dtype == torch.float32 else model
    logits: torch.Tensor = exact(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.to(model.dtype)


def save_tiny(model: PreTrainedModel, folder: Path, *, max_shard_size: str = "1GB") -> Path:
    """Writes config.json and safetensors (several files when a shard is smaller)."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
