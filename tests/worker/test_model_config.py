"""config.json in the spellings of several generations, and what is refused by name."""

from typing import Any

import pytest

from cearx.worker.model_config import UnsupportedModel, from_hf_config

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "eos_token_id": 2,
    "some_future_field": {"anything": 1},
}
QWEN2: dict[str, Any] = {
    **SMOLLM2,
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 21,
    "eos_token_id": [1, 2],
}
QWEN3: dict[str, Any] = {
    **QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "layer_types": ["full_attention"] * 30,
}


def test_llama() -> None:
    """SmolLM2's own config: head_dim follows from the sizes, no biases."""
    config = from_hf_config(SMOLLM2)
    assert (config.head_dim, config.num_kv_heads, config.tie_word_embeddings) == (64, 3, True)
    assert not (config.qkv_bias or config.attention_output_bias or config.mlp_bias)
    assert not config.qk_norm
    assert config.rope.theta == 100000.0 and config.rope.scaling is None
    assert config.source_dtype == "bfloat16"


@pytest.mark.parametrize("field", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_bidirectional_attention_is_refused(field: dict[str, Any]) -> None:
    """Some embedding models look ahead; computing them causally would be silently wrong."""
    with pytest.raises(UnsupportedModel, match="bidirectional"):
        from_hf_config({**QWEN3, **field})


def test_bias_flags() -> None:
    """Llama's flags count; Qwen2 has biases on q, k and v whatever its file says."""
    llama = from_hf_config({**SMOLLM2, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.attention_output_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = from_hf_config(QWEN2)
    assert (qwen2.qkv_bias, qwen2.attention_output_bias, qwen2.mlp_bias) == (True, False, False)
    qwen3 = from_hf_config(QWEN3)
    assert (qwen3.qkv_bias, qwen3.attention_output_bias, qwen3.mlp_bias) == (False, False, False)
    assert qwen3.qk_norm and qwen3.head_dim == 128


def test_absent_fields() -> None:
    """Without num_key_value_heads every head has its own keys; dtype is the newer spelling."""
    raw = {k: v for k, v in SMOLLM2.items() if k not in ("num_key_value_heads", "torch_dtype")}
    config = from_hf_config({**raw, "dtype": "float16"})
    assert config.num_kv_heads == 9 and config.source_dtype == "float16"
    assert from_hf_config({**QWEN3, "head_dim": None}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_unsupported_is_named(change: dict[str, Any], message: str) -> None:
    """What cannot be computed is refused by name."""
    with pytest.raises(UnsupportedModel, match=message):
        from_hf_config({**QWEN2, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": []}, "names no architecture"),
        ({"architectures": 7}, "names no architecture"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size must be in 1..2147483647, got 0"),
        ({"hidden_size": 2**63}, "hidden_size must be in 1..2147483647, got 9223372036854775808"),
        ({"num_attention_heads": 0}, "num_heads must be in 1..2147483647, got 0"),
        ({"num_key_value_heads": 2}, "num_heads 9 is not a multiple of num_kv_heads 2"),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3.*low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "big"}}, "linear.*factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.0}}, "yarn.*> 0.*factor"),
        ({"rope_theta": -1.0}, "theta must be above 0, got -1.0"),
    ],
)
def test_nonsense_is_a_value_error(change: dict[str, Any], message: str) -> None:
    """A field that makes no sense is named with its value."""
    with pytest.raises(ValueError, match=message):
        from_hf_config({**SMOLLM2, **change})
