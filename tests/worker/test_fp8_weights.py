"""Weights rounded to 8-bit floats at load for the GPU: what is rounded, how far, who refuses it."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from device_runners import device_decoder, device_runner
from local_engine import LocalEngine
from safetensors.torch import load_file, save_file
from tiny_models import reference_logits, save_tiny, tiny_model
from transformers import PreTrainedModel

from cearx.core.child import StartupError
from cearx.core.config import ModelFiles, WorkerConfig
from cearx.kernels.fp8_weight import Fp8Weight
from cearx.worker.cuda.decoder import DeviceDecoder
from cearx.worker.cuda.start import load_decoder
from cearx.worker.device import choose_device
from cearx.worker.model_loader import bytes_by_form, open_checkpoint

PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 264, 3]
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""NumPy, which the interpreter computes with, warns where a GPU's result is infinite as well."""


def small(family: str, **options: Any) -> PreTrainedModel:
    return tiny_model(family, **{"num_heads": 2, "num_kv_heads": 1, "num_layers": 1, **options})


def with_rounded_layers(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with the values that 8 bits hold, each checkpoint tensor by itself."""
    rounded = deepcopy(model)
    for name, parameter in rounded.named_parameters():
        if parameter.ndim == 2 and ".layers." in name:
            weight = Fp8Weight.empty(*parameter.shape, torch.float32, CPU)
            weight.store(parameter.data)
            parameter.data.copy_(weight.exact())
    return rounded


def logits(decoder: DeviceDecoder, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, Any]:
    """Of a prompt in two chunks and two decodes behind it, and the tokens."""
    made: list[Any] = []

    def make(config: Any) -> Any:
        made.append(device_runner(decoder, config))
        return made[0]

    engine = LocalEngine(
        None,  # type: ignore[arg-type]
        decoder.config,
        make_runner=make,
        num_blocks=8,
        budget=9,
        max_num_seqs=2,
    )
    sample, seen = made[0]._model.sample, []

    def record(logits_RV: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(logits_RV.clone())
        return sample(logits_RV, *rest)

    monkeypatch.setattr(made[0]._model, "sample", record)
    (tokens,) = engine.generate([PROMPT], 3)
    return torch.cat(seen), tokens


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_logits_are_those_of_the_rounded_weights(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to transformers' with the same values, and near those of the exact weights."""
    reference = small(family)
    found, tokens = logits(device_decoder(reference, 64, fp8=True), monkeypatch)
    ids = PROMPT + tokens[:-1]
    wanted = reference_logits(with_rounded_layers(reference), ids)[len(PROMPT) - 1 :]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    exact = reference_logits(reference, ids)[len(PROMPT) - 1 :]
    error = float((found - exact).norm() / exact.norm())
    assert 1e-3 < error < 0.1, f"relative error of the logits {error}"


def load(folder: Path) -> DeviceDecoder:
    config = WorkerConfig(quantization="fp8", dtype="float32")
    checkpoint = open_checkpoint(ModelFiles(path=folder, name="tiny"), config)
    return load_decoder(checkpoint, config, 64, CPU, lambda *_: None)


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_layers_matrices_are_rounded(tied: bool, tmp_path: Path) -> None:
    """Embedding, head, norms and biases stay; parts of one matrix have scales of their own."""
    reference = small("qwen2", tied=tied)
    stored = load_file(save_tiny(reference, tmp_path) / "model.safetensors")
    decoder = load(tmp_path)
    table = stored["model.embed_tokens.weight"]
    assert torch.equal(decoder.embedding.weight_NK, table)
    assert torch.equal(decoder.head.weight_NK, table if tied else stored["lm_head.weight"])
    layer, rounded = decoder.layers[0], with_rounded_layers(reference).state_dict()
    prefix = "model.layers.0."
    for merged, names in (
        (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.attention_output, ("self_attn.o_proj",)),
        (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
        (layer.down, ("mlp.down_proj",)),
    ):
        wanted = torch.cat([rounded[f"{prefix}{name}.weight"] for name in names])
        assert isinstance(merged.weight, Fp8Weight)
        torch.testing.assert_close(merged.weight.exact(), wanted, atol=0, rtol=1e-6)
    bias = torch.cat([stored[f"{prefix}self_attn.{part}_proj.bias"] for part in "qkv"])
    assert torch.equal(layer.qkv.bias_N, bias)
    matrices = [t for name, t in stored.items() if ".layers." in name and t.ndim == 2]
    forms = bytes_by_form(decoder.weight_slots(), {}, torch.float32)
    assert forms.pop("fp8") == sum(t.numel() + 4 * t.shape[0] for t in matrices)
    total = sum(t.nbytes for name, t in stored.items() if not (tied and name == "lm_head.weight"))
    assert forms == {"float32": total - sum(t.nbytes for t in matrices)}


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    """One infinity would make zeros of its whole row."""
    path = save_tiny(small("llama"), tmp_path) / "model.safetensors"
    tensors, name = load_file(path), "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 5] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(StartupError, match=f"{name}: weights that are not finite"):
        load(tmp_path)


def test_where_there_is_no_fp8_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU and on GPUs before the first that convert it, by name."""
    with pytest.raises(ValueError, match=r"fp8 is for CUDA, got --device cpu"):
        WorkerConfig(quantization="fp8", device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match=r"fp8 needs a GPU"):
        choose_device(WorkerConfig(quantization="fp8"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for capability, is_refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        if is_refused:
            with pytest.raises(StartupError, match=r"8\.9, this one has 8\.0"):
                choose_device(WorkerConfig(quantization="fp8"))
        else:
            assert choose_device(WorkerConfig(quantization="fp8")).type == "cuda"
