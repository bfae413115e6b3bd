"""Steps of few tokens through `kernels/decoder_step.py`, for float32 models on one CPU rank.

Owns the tables of weights and the buffers that the compiled step works on, and the conversion of a
step's metadata. A model builds one and calls it in place of its layers when a step has at most
MAX_TOKENS: layer by layer, a step of one token spends as long between the products as in them.

T tokens, R requests, E hidden size, D head_dim, L layers.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cearx.kernels.decoder_step import (
    COUNTERS_EACH,
    PARTS,
    DecoderWeights,
    StepBuffers,
    StepInputs,
    decoder_step,
)
from cearx.kernels.panels import GROUP
from cearx.worker.attention import AttentionMetadata
from cearx.worker.kv_cache import KVCache
from cearx.worker.linear import ColumnParallelLinear, GatedLinear, RowParallelLinear
from cearx.worker.model_config import ModelConfig
from cearx.worker.norm import RMSNorm
from cearx.worker.panel_weight import PanelWeight
from cearx.worker.thread_team import thread_team

MAX_TOKENS = 128
"""Of a step: with more, torch's attention over whole chunks is the faster one, if less exact."""


class DecoderLayer(Protocol):
    """What is read of a model's layer."""

    attention_norm: RMSNorm
    qkv: ColumnParallelLinear
    attention_output: RowParallelLinear
    mlp_norm: RMSNorm
    gate_up: GatedLinear
    down: RowParallelLinear

    def head_norms(self) -> Tensor | None: ...


class CompiledDecoder:
    def __init__(self, layers: Sequence[DecoderLayer], config: ModelConfig) -> None:
        """The weights must be filled; later changes of norms and biases are not seen."""
        self.max_tokens = MAX_TOKENS
        self._weights = _collect(layers, config)
        head_dim = config.head_dim
        qkv, output, _, down = _products(layers[0])
        self._sizes = (qkv.out_features // head_dim, head_dim)
        self._num_counters = PARTS * len(layers) * COUNTERS_EACH
        self._attended = torch.zeros(MAX_TOKENS, output.num_groups * GROUP)
        self._gated = torch.zeros(MAX_TOKENS, down.num_groups * GROUP)
        self._input_size = qkv.num_groups * GROUP

    def forward(
        self,
        hidden_TE: Tensor,
        positions_T: Tensor,
        tables_T1D: tuple[Tensor, Tensor],
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> None:
        """Embedded tokens become the hidden states behind the last layer, in place."""
        num_tokens, num_threads = hidden_TE.shape[0], torch.get_num_threads()
        lengths_R = metadata.cu_seqlens_q.diff()
        row_T = torch.repeat_interleave(torch.arange(len(lengths_R)), lengths_R)
        cos_TD, sin_TD = (table[:, 0].contiguous().numpy() for table in tables_T1D)
        inputs = StepInputs(
            layers_L=np.array([layer.data_ptr() for layer in kv_cache.layers_SHD]),
            cos_TD=cos_TD,
            sin_TD=sin_TD,
            row_T=row_T.numpy(),
            position_T=positions_T.contiguous().numpy(),
            slot_T=metadata.slot_mapping.contiguous().numpy(),
            block_tables_RM=metadata.block_tables.contiguous().numpy(),
            block_size=kv_cache.block_size,
        )
        buffers = StepBuffers(
            hidden_TE=hidden_TE.numpy(),
            normed_XTE=torch.zeros(num_threads, num_tokens, self._input_size).numpy(),
            qkv_THD=torch.empty(num_tokens, *self._sizes).numpy(),
            attended_TF=self._attended[:num_tokens].numpy(),
            gated_TI=self._gated[:num_tokens].numpy(),
        )

        def job(index: int, threads: int, counters: int, scratch: NDArray[np.float32]) -> None:
            decoder_step(self._weights, inputs, buffers, index, threads, counters, scratch)

        thread_team().run(job, self._num_counters)


def _products(layer: DecoderLayer) -> list[PanelWeight]:
    linears = (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
    products = [linear.weight for linear in linears if isinstance(linear.weight, PanelWeight)]
    assert len(products) == len(linears), "only float32 weights can be compiled"
    return products


def _collect(layers: Sequence[DecoderLayer], config: ModelConfig) -> DecoderWeights:
    products = [_products(layer) for layer in layers]
    tables = [product.panels() for layer in products for product in layer]
    counts = torch.tensor([0] + [len(table) for table in tables])
    biases = [
        torch.stack([layer[which].bias_N for layer in products]).numpy() for which in range(4)
    ]
    norms = [torch.stack((layer.attention_norm.weight, layer.mlp_norm.weight)) for layer in layers]
    head_norms = [norm for layer in layers if (norm := layer.head_norms()) is not None]
    return DecoderWeights(
        panels_P4=torch.cat(tables).numpy(),
        first_panel_X=counts.cumsum(0).numpy(),
        norms_LXE=torch.stack(norms).numpy(),
        head_norms_LXD=(torch.stack(head_norms) if head_norms else torch.empty(0, 2, 1)).numpy(),
        qkv_bias_LF=biases[0],
        output_bias_LE=biases[1],
        gate_up_bias_LF=biases[2],
        down_bias_LE=biases[3],
        num_kv_heads=config.num_kv_heads,
        epsilon=config.rms_norm_eps,
    )
