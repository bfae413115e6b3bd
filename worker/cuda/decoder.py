"""The dense decoder of Llama, Qwen2 and Qwen3 on a device: five to seven operations a layer.

Owns the weights, merged as the kernels want them, and the order of the operations; arithmetic is in
`cearx.kernels`. Every operation writes to a buffer that was there before, so that a step can be
captured in a graph. Built by `start.py`, called by the runner.

T tokens, D decodes, C chunks, R rows with logits, E hidden size, X features of q, k and v, O those
of the attention's output, F MLP width, V vocabulary, N query heads, L positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cearx.kernels import dependent_launch
from cearx.kernels.decode_attention import decode_attention
from cearx.kernels.layer_linear import linear, linear_add, norm_gate_up, norm_linear, takes_rows
from cearx.kernels.norm import rms_norm
from cearx.kernels.position_and_attend import MIN_HEAD_DIM, position_and_attend
from cearx.kernels.position_and_store import position_and_store
from cearx.kernels.prefill_attention import prefill_attention
from cearx.kernels.row_splits import DecodeScratch, make_scratch
from cearx.kernels.scaled_product import RoundedRows
from cearx.kernels.scaled_rows import MAX_SQUARES, NextNorm, ScaledRows
from cearx.worker.cuda.device_weights import MergedWeight, NormWeight
from cearx.worker.model_config import FAMILIES, ModelConfig, UnsupportedModel
from cearx.worker.models.llama import HEAD_WEIGHTS, LAYER_WEIGHTS, MODEL_WEIGHTS
from cearx.worker.models.qwen3 import Qwen3Layer
from cearx.worker.models.weight_map import map_slots
from cearx.worker.rotary import amplitude, inverse_frequencies
from cearx.worker.weights import WeightSlot

HEAD_DIMS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """A step's inputs on the device: the decodes' tokens first, then those of the chunks."""

    input_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    """block * block_size + offset; these three are int64."""
    block_tables_SM: Tensor
    seats_D: Tensor
    """int32, as all below."""
    seq_lens_D: Tensor
    seats_C: Tensor | None = None
    """None in a step of decodes only."""
    cu_seqlens_q: Tensor | None = None
    """[C + 1], counted from the first chunk's first token."""
    seq_lens_C: Tensor | None = None
    """Tokens of the request up to the end of its chunk."""
    max_chunk_len: int = 0
    logits_indices_R: Tensor | None = None
    """int64 indices into T of the rows whose logits are wanted; None: all of T."""


class Workspace:
    """Buffers for the largest step, allocated once."""

    def __init__(
        self,
        config: ModelConfig,
        max_num_tokens: int,
        max_num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8: bool = False,
    ) -> None:
        """`fp8`: the products of the layers have 8-bit weights."""

        def buffer(num_rows: int, width: int) -> Tensor:
            return torch.empty(num_rows, width, dtype=dtype, device=device)

        num_heads = config.num_heads + 2 * config.num_kv_heads
        self.residual_TE = buffer(max_num_tokens, config.hidden_size)
        self.normed_TE = buffer(max_num_tokens, config.hidden_size)
        self.qkv_TX = buffer(max_num_tokens, num_heads * config.head_dim)
        self.attended_TO = buffer(max_num_tokens, config.num_heads * config.head_dim)
        self.gate_up_T2F = buffer(max_num_tokens, 2 * config.intermediate_size)
        self.mlp_TF = buffer(max_num_tokens, config.intermediate_size)
        self.rounded: RoundedRows | None = None
        if fp8:
            widest = max(
                config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
            )
            self.rounded = RoundedRows.allocate(
                max_num_tokens, widest, config.hidden_size, dtype, device
            )
        self.squares = torch.empty(MAX_SQUARES, dtype=torch.float32, device=device)
        self.rows_RE = buffer(max_num_rows, config.hidden_size)
        self.logits_RV = buffer(max_num_rows, config.vocab_size)
        self.attention: DecodeScratch = make_scratch(
            max_num_rows, config.num_heads, config.head_dim, device
        )


class DeviceLayer:
    """The weights of one layer."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, fp8: bool
    ) -> None:
        size, head_dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        width = config.intermediate_size
        place = (dtype, device)
        self.attention_norm = NormWeight(("",), size, *place)
        qkv_parts = (("q", q_size), ("k", kv_size), ("v", kv_size))
        self.qkv = MergedWeight(qkv_parts, size, config.qkv_bias, *place, fp8=fp8)
        self.qk_norm = NormWeight(("q", "k"), head_dim, *place) if config.qk_norm else None
        self.attention_output = MergedWeight(
            (("", size),), q_size, config.attention_output_bias, *place, fp8=fp8
        )
        self.mlp_norm = NormWeight(("",), size, *place)
        gate_up_parts = (("gate", width), ("up", width))
        self.gate_up = MergedWeight(gate_up_parts, size, False, *place, fp8=fp8)
        self.down = MergedWeight((("", size),), width, False, *place, fp8=fp8)

    def qk_norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """[D] of the queries and of the keys; None in a model without such norms."""
        if self.qk_norm is None:
            return None, None
        return self.qk_norm.parts["q"], self.qk_norm.parts["k"]

    @property
    def num_bytes(self) -> int:
        """Of its matrices."""
        return sum(m.num_bytes for m in (self.qkv, self.attention_output, self.gate_up, self.down))

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        names = LAYER_WEIGHTS if self.qk_norm is None else Qwen3Layer.weights
        return map_slots(self, names, prefix)


class DeviceDecoder:
    """The model; `weight_slots` must be filled before `forward`.

    With `fp8` the matrices of its layers are rounded to 8 bits as they come; embedding and head
    stay as they are. Raises UnsupportedModel for what the kernels cannot compute.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8: bool = False,
    ) -> None:
        _refuse_unsupported(config)
        self.config = config
        self.dtype = dtype
        self.device = device
        self.fp8 = fp8
        vocabulary = (("", config.vocab_size),)
        self.embedding = MergedWeight(vocabulary, config.hidden_size, False, dtype, device)
        self.head = self.embedding
        if not config.tie_word_embeddings:
            self.head = MergedWeight(vocabulary, config.hidden_size, False, dtype, device)
        self.norm = NormWeight(("",), config.hidden_size, dtype, device)
        self.layers = [DeviceLayer(config, dtype, device, fp8) for _ in range(config.num_layers)]
        dependent_launch.enable_on(device, self.layers[0].num_bytes)
        self.cos_sin_LD = cos_sin_table(config, max_model_len).to(device)
        self._scale = config.head_dim**-0.5

    def weight_slots(self) -> dict[str, WeightSlot]:
        """By Hugging Face's names."""
        slots = map_slots(self, MODEL_WEIGHTS, "")
        for index, layer in enumerate(self.layers):
            slots |= layer.weight_slots(f"model.layers.{index}.")
        if not self.config.tie_word_embeddings:
            slots |= map_slots(self, HEAD_WEIGHTS, "")
        return slots

    def forward(
        self, step: StepTensors, kv_layers_B2KPD: Sequence[Tensor], workspace: Workspace
    ) -> Tensor:
        """Logits [R, V] in the model's type, a view of the workspace; writes the step's KV."""
        num_tokens = len(step.input_ids_T)
        x_TE = workspace.residual_TE[:num_tokens]
        torch.index_select(self.embedding.weight_NK, 0, step.input_ids_T, out=x_TE)
        rows: ScaledRows | None = None
        following = (*self.layers[1:], None)
        for layer, after, kv_B2KPD in zip(self.layers, following, kv_layers_B2KPD, strict=True):
            next_norm = None
            if after is not None and takes_rows(num_tokens, after.qkv.weight, gated=False):
                next_norm = self._next_norm(after.attention_norm, num_tokens, workspace)
            rows = self._forward_layer(layer, x_TE, step, kv_B2KPD, workspace, rows, next_norm)
        rows_RE = x_TE
        if step.logits_indices_R is not None:
            rows_RE = workspace.rows_RE[: len(step.logits_indices_R)]
            torch.index_select(x_TE, 0, step.logits_indices_R, out=rows_RE)
        normed_RE = workspace.normed_TE[: len(rows_RE)]
        logits_RV = workspace.logits_RV[: len(rows_RE)]
        rms_norm(rows_RE, self.norm.parts[""], self.config.rms_norm_eps, normed_RE)
        linear(normed_RE, self.head.weight_NK, logits_RV)
        return logits_RV

    def head_rows(self, token_ids_T: Tensor) -> Tensor:
        """Rows [T, E] of the head's matrix, for tokens on any device."""
        return self.head.weight_NK[token_ids_T.to(self.device)]

    def run_products(self, num_tokens: int, workspace: Workspace) -> None:
        """A layer's products of whatever the workspace holds; the library loads its kernels."""
        layer, eps = self.layers[0], self.config.rms_norm_eps
        x_TE, normed_TE = workspace.residual_TE[:num_tokens], workspace.normed_TE[:num_tokens]
        attended_TO, mlp_TF = workspace.attended_TO[:num_tokens], workspace.mlp_TF[:num_tokens]
        qkv, output, gate_up = layer.qkv, layer.attention_output, layer.gate_up
        norm = layer.mlp_norm.parts[""]
        qkv_TX, gate_up_T2F = workspace.qkv_TX[:num_tokens], workspace.gate_up_T2F[:num_tokens]
        memory = (None, workspace.rounded)
        norm_linear(x_TE, norm, eps, qkv.weight, qkv.bias_N, qkv_TX, normed_TE, *memory)
        linear_add(attended_TO, output.weight, output.bias_N, x_TE, *memory)
        norm_gate_up(x_TE, norm, eps, gate_up.weight, mlp_TF, normed_TE, gate_up_T2F, *memory)
        linear_add(mlp_TF, layer.down.weight, None, x_TE, *memory)
        num_rows = min(num_tokens, len(workspace.logits_RV))
        linear(normed_TE[:num_rows], self.head.weight_NK, workspace.logits_RV[:num_rows])

    def _forward_layer(
        self,
        layer: DeviceLayer,
        x_TE: Tensor,
        step: StepTensors,
        kv_B2KPD: Tensor,
        workspace: Workspace,
        rows: ScaledRows | None,
        next_norm: NextNorm | None,
    ) -> ScaledRows | None:
        """Adds the layer's output to the residual stream `x_TE` in place.

        `rows` are those for this layer's first norm, the result those for `next_norm`.
        """
        config, eps, num_tokens = self.config, self.config.rms_norm_eps, len(x_TE)
        normed_TE = workspace.normed_TE[:num_tokens]
        qkv_TX = workspace.qkv_TX[:num_tokens]
        attended_TO = workspace.attended_TO[:num_tokens]
        mlp_TF = workspace.mlp_TF[:num_tokens]
        qkv, norm = layer.qkv, layer.attention_norm.parts[""]
        rounded = workspace.rounded
        norm_linear(x_TE, norm, eps, qkv.weight, qkv.bias_N, qkv_TX, normed_TE, rows, rounded)
        # Where prompts are computed as well, they and the decodes share the first of two kernels.
        if step.seats_C is None and config.head_dim >= MIN_HEAD_DIM:
            self._attend_decodes(layer, qkv_TX, attended_TO, step, kv_B2KPD, workspace)
        else:
            self._attend(layer, qkv_TX, attended_TO, step, kv_B2KPD, workspace)
        output = layer.attention_output
        mlp_norm = None
        if takes_rows(num_tokens, layer.gate_up.weight, gated=True):
            mlp_norm = self._next_norm(layer.mlp_norm, num_tokens, workspace)
        rows = linear_add(attended_TO, output.weight, output.bias_N, x_TE, mlp_norm, rounded)
        norm_gate_up(
            x_TE,
            layer.mlp_norm.parts[""],
            eps,
            layer.gate_up.weight,
            mlp_TF,
            normed_TE,
            workspace.gate_up_T2F[:num_tokens],
            rows,
            rounded,
        )
        return linear_add(mlp_TF, layer.down.weight, None, x_TE, next_norm, rounded)

    def _next_norm(self, norm: NormWeight, num_tokens: int, workspace: Workspace) -> NextNorm:
        """The rows take the place where the norm's kernel would write, which then does not run."""
        scaled_TE = workspace.normed_TE[:num_tokens]
        return NextNorm(norm.parts[""], self.config.rms_norm_eps, scaled_TE, workspace.squares)

    def _attend_decodes(
        self,
        layer: DeviceLayer,
        qkv_TX: Tensor,
        attended_TO: Tensor,
        step: StepTensors,
        kv_B2KPD: Tensor,
        workspace: Workspace,
    ) -> None:
        config = self.config
        position_and_attend(
            qkv_TX,
            *layer.qk_norm_weights(),
            config.rms_norm_eps,
            self.cos_sin_LD,
            kv_B2KPD,
            step.block_tables_SM,
            step.seats_D,
            step.seq_lens_D,
            attended_TO.view(-1, config.num_heads, config.head_dim),
            workspace.attention,
            self._scale,
        )

    def _attend(
        self,
        layer: DeviceLayer,
        qkv_TX: Tensor,
        attended_TO: Tensor,
        step: StepTensors,
        kv_B2KPD: Tensor,
        workspace: Workspace,
    ) -> None:
        num_heads, head_dim = self.config.num_heads, self.config.head_dim
        position_and_store(
            qkv_TX,
            *layer.qk_norm_weights(),
            self.config.rms_norm_eps,
            self.cos_sin_LD,
            step.positions_T,
            step.slots_T,
            kv_B2KPD,
            num_q_heads=num_heads,
            num_kv_heads=self.config.num_kv_heads,
        )
        q_TND = qkv_TX[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
        out_TND = attended_TO.view(-1, num_heads, head_dim)
        num_decodes = len(step.seats_D)
        if num_decodes:
            decode_attention(
                q_TND[:num_decodes],
                kv_B2KPD,
                step.block_tables_SM,
                step.seats_D,
                step.seq_lens_D,
                out_TND[:num_decodes],
                workspace.attention,
                self._scale,
            )
        if step.seats_C is not None:
            assert step.cu_seqlens_q is not None and step.seq_lens_C is not None
            prefill_attention(
                q_TND[num_decodes:],
                kv_B2KPD,
                step.block_tables_SM,
                step.seats_C,
                step.cu_seqlens_q,
                step.seq_lens_C,
                out_TND[num_decodes:],
                step.max_chunk_len,
                self._scale,
            )


def cos_sin_table(config: ModelConfig, num_positions: int) -> Tensor:
    """[L, D] in float32: the cosines of all frequencies, then their sines."""
    frequencies_F = inverse_frequencies(config.rope, config.head_dim)
    angles_LF = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies_F
    return torch.cat((angles_LF.cos(), angles_LF.sin()), dim=-1).mul_(amplitude(config.rope))


def _refuse_unsupported(config: ModelConfig) -> None:
    if config.architecture not in FAMILIES:
        raise UnsupportedModel(
            f"architecture {config.architecture} runs on --device cpu only; on CUDA there are "
            f"{', '.join(FAMILIES)}"
        )
    if config.mlp_bias:
        raise UnsupportedModel("biases in the MLP are not supported on CUDA; use --device cpu")
    if config.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise UnsupportedModel(
            f"head_dim {config.head_dim} is not supported on CUDA ({sizes} are); use --device cpu"
        )
