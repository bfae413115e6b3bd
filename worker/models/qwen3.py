"""Qwen3 (dense): Llama without biases and with an RMSNorm over each query and key head.

Owns the place of that norm, before the rotation, and the names of its weights.

T tokens, H query and key heads, D head_dim.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cearx.worker.model_config import FAMILIES, Family, ModelConfig
from cearx.worker.models.llama import LAYER_WEIGHTS, LlamaForCausalLM, LlamaLayer, StepTables
from cearx.worker.norm import QKNorm
from cearx.worker.rotary import rotate_in_place
from cearx.worker.tensor_parallel import TensorParallel


class Qwen3Layer(LlamaLayer):
    weights: Mapping[str, str] = {
        **LAYER_WEIGHTS,
        "self_attn.q_norm": "qk_norm.q",
        "self_attn.k_norm": "qk_norm.k",
    }

    def __init__(self, config: ModelConfig, dtype: torch.dtype, tp: TensorParallel) -> None:
        super().__init__(config, dtype, tp)
        self.qk_norm = QKNorm(
            self.num_q_heads, self.num_kv_heads, self.head_dim, config.rms_norm_eps, dtype
        )

    def head_norms(self) -> Tensor:
        return torch.stack((self.qk_norm.weight[0], self.qk_norm.weight[-1]))

    def position(self, qk_THD: Tensor, step: StepTables) -> None:
        """Normalises each head, then turns it by its position, in place."""
        qk_THD.copy_(self.qk_norm.forward(qk_THD))
        rotate_in_place(qk_THD, step.cos_T1D, step.sin_T1D)


class Qwen3ForCausalLM(LlamaForCausalLM):
    family: Family = FAMILIES["Qwen3ForCausalLM"]
    layer_type: type[LlamaLayer] = Qwen3Layer
    compiled_layers: tuple[type[LlamaLayer], ...] = (Qwen3Layer,)
