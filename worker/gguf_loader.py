"""Reads a model out of a GGUF file: its shape, and its weights under Hugging Face names.

Owns the differences between the two worlds: tensor names, the row order of Q and K that llama
conversion uses, and where the RoPE scaling is kept. Parsing and block formats are `gguf_file.py`.
Called by the model loader. What the file asks for and this worker cannot compute is refused.
"""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from cearx.core.gguf_file import GGUFError, GGUFFile
from cearx.worker.block_quantised import BlockQuantised
from cearx.worker.gguf_blocks import DECODERS
from cearx.worker.model_config import (
    DivisorScaling,
    LinearScaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    UnsupportedModel,
    YarnScaling,
)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
UNSUPPORTED_KEYS = (
    "expert_count",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.sliding_window",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_log_multiplier",
)
"""Each changes the computation in a way that the models here do not know."""

HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_DIVISORS = "rope_freqs.weight"
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
TENSOR = re.compile(r"(\w+)\.(weight|bias)")


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """The model's shape; raises UnsupportedModel, or GGUFError for a file that makes no sense."""
    split_count = file.get("split.count")
    if isinstance(split_count, int) and split_count > 1:
        raise UnsupportedModel(f"{file.path} is one of {split_count} parts: merge them first")
    keys = _Keys(file)
    if keys.architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {keys.architecture!r} is not supported in GGUF files; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    keys.refuse(UNSUPPORTED_KEYS)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise GGUFError(f"{file.path} has no tensor 'token_embd.weight'")
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden_size // max(1, num_heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(name, head_dim) != head_dim:
            raise UnsupportedModel(f"{name} {keys.integer(name)} is not head_dim {head_dim}")
    max_position_embeddings = keys.integer("context_length")
    try:
        return ModelConfig(
            architecture=ARCHITECTURES[keys.architecture],
            hidden_size=hidden_size,
            num_layers=keys.integer("block_count"),
            num_heads=num_heads,
            num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=keys.integer("feed_forward_length"),
            vocab_size=embedding.shape[0],
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope=RopeConfig(
                theta=keys.number("rope.freq_base", 10_000.0),
                scaling=_rope_scaling(keys, head_dim, max_position_embeddings),
            ),
            tie_word_embeddings="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            attention_output_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        )
    except ValueError as error:
        raise GGUFError(f"{file.path}: {error}") from error


class _Keys:
    """The metadata below the architecture's name."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = str(file.get("general.architecture"))

    def integer(self, name: str, absent: int | None = None) -> int:
        value = self.file.get(f"{self.architecture}.{name}")
        value = absent if value is None else value
        if type(value) is not int:
            raise GGUFError(
                f"{self.file.path}: {self.architecture}.{name} must be an integer, got {value!r}"
            )
        return value

    def number(self, name: str, absent: float | None = None) -> float:
        value = self.file.get(f"{self.architecture}.{name}")
        value = absent if value is None else value
        if type(value) not in (int, float):
            raise GGUFError(
                f"{self.file.path}: {self.architecture}.{name} must be a number, got {value!r}"
            )
        return float(value)  # type: ignore[arg-type]

    def refuse(self, names: Iterable[str]) -> None:
        for name in names:
            value = self.file.get(f"{self.architecture}.{name}")
            is_neutral = isinstance(value, int | float) and value in (0, 1)
            if value is not None and not is_neutral:
                raise UnsupportedModel(f"{self.architecture}.{name} {value} is not supported")


def _rope_scaling(keys: _Keys, head_dim: int, context_length: int) -> RopeScaling | None:
    kind = keys.file.get(f"{keys.architecture}.rope.scaling.type")
    if ROPE_DIVISORS in keys.file.tensors:
        if kind not in (None, "none"):
            raise UnsupportedModel(f"RoPE scaling {kind} together with {ROPE_DIVISORS}")
        divisors = keys.file.array(ROPE_DIVISORS)
        if divisors.shape != (head_dim // 2,):
            raise GGUFError(
                f"{keys.file.path}: {ROPE_DIVISORS} must have {head_dim // 2} items, "
                f"got {divisors.shape}"
            )
        return DivisorScaling(divisors=tuple(divisors.tolist()))
    if kind in (None, "none"):
        return None
    factor = keys.number("rope.scaling.factor")
    if kind == "linear":
        return LinearScaling(factor=factor)
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", context_length)
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    raise UnsupportedModel(f"RoPE scaling {kind} is not supported; supported: none, linear, yarn")


class GGUFWeights:
    """A `QuantisedSource`: the weights of a GGUF file by Hugging Face name."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises UnsupportedModel when the file holds a tensor that no model here has."""
        self._file = file
        self._config = gguf_model_config(file)
        self._tensors = {_hf_name(name): name for name in file.tensors if name != ROPE_DIVISORS}

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def get(self, name: str) -> Tensor:
        """The whole tensor; raises GGUFError when it cannot be decoded or has a wrong shape."""
        tensor_name = self._tensors[name]
        array = self._file.array(tensor_name)
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        order = self._row_order(tensor_name)
        return tensor if order is None else tensor[order]

    def get_quantised(self, name: str) -> BlockQuantised | None:
        """The tensor's own codes and scales, of the kinds in DECODERS; raises as `get` does."""
        tensor_name = self._tensors[name]
        tensor = self._file.tensors[tensor_name]
        decode = DECODERS.get(tensor.kind)
        if decode is None or len(tensor.shape) != 2:
            return None
        blocks = decode(self._file.blocks(tensor_name), tensor.shape)
        order = self._row_order(tensor_name)
        return blocks if order is None else blocks.rows(order.numpy())

    def _row_order(self, name: str) -> Tensor | None:
        """Puts the rows of each head from pairs (x0 y0 x1 y1 ..) to halves (x0 x1 .. y0 y1 ..).

        Both are the same rotation: pairs is how the llama converter stores it, halves is how the
        models here compute it. None where rows stay as they are.
        """
        if self._config.architecture != "LlamaForCausalLM":
            return None
        num_heads = {"attn_q": self._config.num_heads, "attn_k": self._config.num_kv_heads}.get(
            name.split(".")[-2]
        )
        if num_heads is None:
            return None
        num_rows = num_heads * self._config.head_dim
        found = self._file.tensors[name].shape[0]
        if found != num_rows:
            raise GGUFError(
                f"{self._file.path}: tensor {name!r} must have {num_rows} rows, got {found}"
            )
        return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _hf_name(name: str) -> str:
    if (layer := LAYER_TENSOR.fullmatch(name)) and layer[2] in HF_LAYER_NAMES:
        return f"model.layers.{layer[1]}.{HF_LAYER_NAMES[layer[2]]}.{layer[3]}"
    if (whole := TENSOR.fullmatch(name)) and whole[1] in HF_NAMES:
        return f"{HF_NAMES[whole[1]]}.{whole[2]}"
    raise UnsupportedModel(f"tensor {name!r} belongs to no supported model")
