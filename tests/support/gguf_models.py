"""Writes transformers models as GGUF files, by the conventions of the usual converter.

Names come from the `gguf` package's own table; llama stores the rows of Q and K as interleaved
pairs, and Llama 3.1's RoPE scaling as one divisor per frequency.
"""

import math
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}


def interleave(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The rows of each head from two halves to pairs of one row of each half."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def llama3_divisors(config) -> np.ndarray:
    """One per frequency: 1 for short wavelengths, `factor` for long ones, a ramp between."""
    rope = config.rope_parameters
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original = rope["original_max_position_embeddings"]
    divisors = []
    for index in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / config.head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """GGUF name -> float32 array."""
    config = model.config
    is_llama = config.architectures[0] == "LlamaForCausalLM"
    names = gguf.get_tensor_name_map(
        ARCHITECTURES[config.architectures[0]], config.num_hidden_layers
    )
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if is_llama and ".q_proj." in name:
            tensor = interleave(tensor, config.num_attention_heads)
        if is_llama and ".k_proj." in name:
            tensor = interleave(tensor, config.num_key_value_heads)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        tensors[gguf_name] = tensor.numpy().copy()
    if config.rope_parameters["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_divisors(config)
    return tensors


def write_model(
    model: PreTrainedModel, path: Path, kind: Kind = Kind.F32, tweak=lambda writer: None
) -> Path:
    """Writes the model; matrices as `kind` where their rows allow it, vectors as float32."""
    config = model.config
    config.architectures = [type(model).__name__]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.architectures[0]]])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    if head_dim != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.architectures[0] == "LlamaForCausalLM":
        writer.add_rope_dimension_count(head_dim)
        writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    tweak(writer)
    for name, array in gguf_tensors(model).items():
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        kind_here = kind if array.ndim == 2 and array.shape[1] % block == 0 else Kind.F32
        raw = gguf.quants.quantize(array, kind_here)
        writer.add_tensor(name, raw, raw_dtype=kind_here)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
