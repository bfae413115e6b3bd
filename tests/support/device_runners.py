"""The CUDA worker's runner over a tiny model, on the GPU or in Triton's interpreter."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from triton_interpreter import mend_fp8_casts, mend_loop_bounds
from worker_models import StateDictSource, worker_config

from cearx.core.config import SchedulerConfig
from cearx.kernels import decode_attention as decode
from cearx.kernels import layer_linear as layers
from cearx.kernels import norm
from cearx.kernels import position_and_attend as attend
from cearx.kernels import position_and_store as position
from cearx.kernels import prefill_attention as prefill
from cearx.worker.cuda import decoder
from cearx.worker.cuda.decoder import DeviceDecoder
from cearx.worker.cuda.device_model import DeviceModel
from cearx.worker.cuda.graph_runner import Mode
from cearx.worker.cuda.runner import CudaRunner
from cearx.worker.cuda.start import build_model, build_runner
from cearx.worker.device import StepSizes
from cearx.worker.weights import fill_slots

if os.environ.get("TRITON_INTERPRET") == "1":
    mend_fp8_casts()
    mend_loop_bounds()


class EagerGraphs:
    """Stands for captured graphs: runs the padded step that a graph would replay."""

    def __init__(self, model: DeviceModel, sizes: tuple[int, ...]) -> None:
        self._model = model
        self.sizes = sizes
        self.replayed: set[tuple[int, Mode]] = set()

    def replay(self, size: int, mode: Mode) -> None:
        """As `StepGraphs.replay`."""
        self.replayed.add((size, mode))
        self._model.decode(size, mode)


def device_decoder(
    reference: PreTrainedModel,
    max_model_len: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    fp8: bool = False,
) -> DeviceDecoder:
    """The worker's decoder with a transformers model's weights."""
    config = worker_config(reference)
    device_decoder = DeviceDecoder(config, max_model_len, dtype, torch.device(device), fp8=fp8)
    fill_slots(
        device_decoder.weight_slots(),
        StateDictSource(reference),
        ignored=lambda name: config.tie_word_embeddings and name == "lm_head.weight",
        on_progress=lambda *_: None,
    )
    return device_decoder


def device_model(
    model: DeviceDecoder, config: SchedulerConfig, kv_dtype: torch.dtype | None = None
) -> DeviceModel:
    """The decoder with its buffers, over a pool in which nothing is a number before written."""
    sizes = StepSizes(config.block_size, config.max_num_seqs, config.max_num_batched_tokens)
    built = build_model(model, sizes, config.max_model_len, kv_dtype)
    built.allocate_kv(config.num_blocks)
    for layer_B2KPD in built.kv_layers_B2KPD:
        layer_B2KPD[: config.num_blocks].fill_(torch.nan)
    return built


def device_runner(
    model: DeviceDecoder, config: SchedulerConfig, kv_dtype: torch.dtype | None = None
) -> CudaRunner:
    """A runner of the sizes that a scheduler plans for."""
    sizes = StepSizes(config.block_size, config.max_num_seqs, config.max_num_batched_tokens)
    return build_runner(device_model(model, config, kv_dtype), sizes, config.max_model_len)


def use_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces a layer's kernels by their references, which run a hundred times faster here.

    For tests of plans and batches; the kernels have their own tests.
    """

    def into(reference: Callable[..., Tensor], out_index: int, num_inputs: int) -> Any:
        def run(*arguments: Any) -> None:
            arguments[out_index].copy_(reference(*arguments[:num_inputs]))

        return run

    def position_and_store(*arguments: Any, **heads: int) -> None:
        qkv_TX, kv_B2KPD = position.reference_position_and_store(*arguments, **heads)
        arguments[0].copy_(qkv_TX)
        arguments[7].copy_(kv_B2KPD)

    def decode_attention(*arguments: Any) -> None:
        arguments[5].copy_(decode.reference_decode_attention(*arguments[:5], arguments[7]))

    def position_and_attend(*arguments: Any) -> None:
        reference = attend.reference_position_and_attend
        out_RND, kv_B2KPD = reference(*arguments[:9], arguments[11])
        arguments[9].copy_(out_RND)
        arguments[5].copy_(kv_B2KPD)

    def prefill_attention(*arguments: Any) -> None:
        arguments[6].copy_(prefill.reference_prefill_attention(*arguments[:6], arguments[8]))

    def linear_add(
        x_TK: Tensor,
        weight: Any,
        bias_N: Any,
        residual_TN: Tensor,
        next_norm: None = None,
        rounded: Any = None,
    ) -> None:
        assert next_norm is None, "the references know no rows for a next norm"
        residual_TN.copy_(layers.linear_add_reference(x_TK, weight, bias_N, residual_TN))

    def linear(x_TK: Tensor, weight_NK: Tensor, out_TN: Tensor) -> None:
        torch.mm(x_TK, weight_NK.t(), out=out_TN)

    monkeypatch.setattr(decoder, "norm_linear", into(layers.norm_linear_reference, 5, 5))
    monkeypatch.setattr(decoder, "norm_gate_up", into(layers.norm_gate_up_reference, 4, 4))
    monkeypatch.setattr(decoder, "rms_norm", into(norm.rms_norm_reference, 3, 3))
    for replaced in (
        position_and_store,
        decode_attention,
        position_and_attend,
        prefill_attention,
        linear_add,
        linear,
    ):
        monkeypatch.setattr(decoder, replaced.__name__, replaced)
