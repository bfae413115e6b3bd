"""Llama: the dense decoder from which the other families differ in a few lines.

Owns the order of operations of a layer and the names of its weights; arithmetic is in the shared
layers. Qwen2 and Qwen3 build on it. The loader constructs it, the worker's loop calls `forward`.

T tokens, E hidden size, N query heads, K key-value heads, H = N + 2 * K, D head_dim, F = H * D,
V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cearx.worker.attention import (
    AttentionMetadata,
    AttentionPlan,
    paged_attention,
    plan_attention,
)
from cearx.worker.kv_cache import KVCache
from cearx.worker.linear import (
    ColumnParallelLinear,
    GatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from cearx.worker.model_config import FAMILIES, Family, ModelConfig
from cearx.worker.models.weight_map import map_slots
from cearx.worker.norm import RMSNorm
from cearx.worker.rotary import Rotary, rotate_in_place
from cearx.worker.tensor_parallel import TensorParallel
from cearx.worker.weights import WeightSlot

if TYPE_CHECKING:
    from cearx.worker.compiled_decoder import CompiledDecoder

MODEL_WEIGHTS = {"model.embed_tokens": "embedding", "model.norm": "norm"}
HEAD_WEIGHTS = {"lm_head": "head"}
LAYER_WEIGHTS = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "qkv.q",
    "self_attn.k_proj": "qkv.k",
    "self_attn.v_proj": "qkv.v",
    "self_attn.o_proj": "attention_output",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate_up.gate",
    "mlp.up_proj": "gate_up.up",
    "mlp.down_proj": "down",
}


@dataclass(frozen=True, eq=False)
class StepTables:
    """What all layers of one step share."""

    cos_T1D: Tensor
    sin_T1D: Tensor
    plan: AttentionPlan


class LlamaLayer:
    weights: Mapping[str, str] = LAYER_WEIGHTS

    def __init__(self, config: ModelConfig, dtype: torch.dtype, tp: TensorParallel) -> None:
        size, head_dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        parts = (("q", q_size, head_dim), ("k", kv_size, head_dim), ("v", kv_size, head_dim))
        self.attention_norm = RMSNorm(size, config.rms_norm_eps, dtype)
        self.qkv = ColumnParallelLinear(size, parts, config.qkv_bias, dtype, tp)
        self.attention_output = RowParallelLinear(
            q_size, size, config.attention_output_bias, dtype, tp, unit=head_dim
        )
        self.mlp_norm = RMSNorm(size, config.rms_norm_eps, dtype)
        self.gate_up = GatedLinear(size, config.intermediate_size, config.mlp_bias, dtype, tp)
        self.down = RowParallelLinear(config.intermediate_size, size, config.mlp_bias, dtype, tp)
        self.head_dim = head_dim
        self.num_q_heads = self.qkv.sizes["q"] // head_dim
        self.num_kv_heads = self.qkv.sizes["k"] // head_dim

    def forward(self, x_TE: Tensor, kv_SHD: Tensor, step: StepTables) -> None:
        """Adds the layer's output to the residual stream `x_TE` in place."""
        qkv_TF = self.qkv.forward(self.attention_norm.forward(x_TE))
        qkv_THD = qkv_TF.view(x_TE.shape[0], -1, self.head_dim)
        self.position(qkv_THD[:, : self.num_q_heads + self.num_kv_heads], step)
        q_TND, kv_new_THD = qkv_THD.tensor_split((self.num_q_heads,), dim=1)
        attended_TND = paged_attention(q_TND, kv_new_THD, kv_SHD, step.plan)
        self.attention_output.add_to(attended_TND.flatten(1), x_TE)
        self.down.add_to(self.gate_up.forward(self.mlp_norm.forward(x_TE)), x_TE)

    def head_norms(self) -> Tensor | None:
        """[2, D]: weights of the norms over each query and key, where the model has them."""
        return None

    def position(self, qk_THD: Tensor, step: StepTables) -> None:
        """Turns queries and keys by their positions, in place."""
        rotate_in_place(qk_THD, step.cos_T1D, step.sin_T1D)


class LlamaForCausalLM:
    family: Family = FAMILIES["LlamaForCausalLM"]
    layer_type: type[LlamaLayer] = LlamaLayer
    compiled_layers: tuple[type[LlamaLayer], ...] = (LlamaLayer,)
    """Layers whose arithmetic is exactly the compiled step's; a subclass may change it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, tp: TensorParallel) -> None:
        self.config = config
        self.dtype = dtype
        self.head = VocabParallelHead(config.vocab_size, config.hidden_size, dtype, tp)
        self.embedding = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            dtype,
            tp,
            tied_to=self.head if config.tie_word_embeddings else None,
        )
        self.rotary = Rotary(config.rope, config.head_dim, dtype)
        self.layers = [self.layer_type(config, dtype, tp) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots = map_slots(self, MODEL_WEIGHTS, "")
        for index, layer in enumerate(self.layers):
            slots |= map_slots(layer, layer.weights, f"model.layers.{index}.")
        if not self.config.tie_word_embeddings:
            slots |= map_slots(self, HEAD_WEIGHTS, "")
        return slots

    @cached_property
    def compiled(self) -> "CompiledDecoder | None":
        """Built for the first step, when the weights are there; None where it cannot compute."""
        if (
            self.dtype != torch.float32
            or self.head.tp.size > 1
            or self.layer_type not in self.compiled_layers
            or self.config.head_dim % 16
        ):
            return None
        from cearx.worker.compiled_decoder import CompiledDecoder  # loads a compiler

        return CompiledDecoder(self.layers, self.config)

    def hidden_states(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The residual stream behind the last layer [T, E]; see `LanguageModel`."""
        x_TE = self.embedding.forward(input_ids_T)
        if self.compiled is not None and 0 < len(x_TE) <= self.compiled.max_tokens:
            tables_T1D = self.rotary.tables(positions_T)
            self.compiled.forward(x_TE, positions_T, tables_T1D, kv_cache, metadata)
            return x_TE
        token_bytes = kv_cache.layers_SHD[0][0].nbytes
        plan = plan_attention(metadata, kv_cache.block_size, token_bytes, self.dtype)
        step = StepTables(*self.rotary.tables(positions_T), plan)
        for layer, kv_SHD in zip(self.layers, kv_cache.layers_SHD, strict=True):
            layer.forward(x_TE, kv_SHD, step)
        return x_TE

    def logits(self, x_RE: Tensor) -> Tensor:
        """Logits [R, V] in float32."""
        return self.head.forward(self.final_norm(x_RE))

    def final_norm(self, x_RE: Tensor) -> Tensor:
        return self.norm.forward(x_RE)

    def head_rows(self, token_ids_T: Tensor) -> Tensor:
        assert self.head.tp.size == 1, "the rows of a head that ranks share are not gathered yet"
        return self.head.weight.columns(token_ids_T)

    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        logits_indices_R: Tensor,
    ) -> Tensor:
        """One step, as `LanguageModel.forward` says; returns logits [R, V] in float32."""
        x_TE = self.hidden_states(input_ids_T, positions_T, kv_cache, metadata)
        return self.logits(x_TE[logits_indices_R])
