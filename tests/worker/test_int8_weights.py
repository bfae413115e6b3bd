"""Weights rounded to int8 at load: how far they move, and what they leave alone."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_models import write_model
from paged_steps import PagedSequence, PagedSteps
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, reference_logits, save_tiny, tiny_model
from torch import Tensor
from worker_models import kv_pool

from cearx.core.child import StartupError
from cearx.core.config import ModelFiles, WorkerConfig
from cearx.worker.block_quantised import BlockQuantised, round_to_int8
from cearx.worker.device import choose_device
from cearx.worker.memory_plan import weights_text
from cearx.worker.model_loader import LoadedModel, load_model
from cearx.worker.panel_weight import PanelWeight

IDS = [(37 * index) % 298 + 3 for index in range(90)]
COUNTS = [70, 17, 1, 1, 1]
"""The first is a step of layers, the others are compiled ones."""


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


def values_of(blocks: BlockQuantised) -> Tensor:
    """In float64, without panels."""
    scales_NK = blocks.scales_NG.astype(np.float64).repeat(32, 1)[:, : blocks.shape[1]]
    return torch.from_numpy(scales_NK * blocks.codes_NK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 64), (45, 200), (1, 7)])
def test_rounding_is_within_half_a_step(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A step is a block's largest magnitude / 127; a shorter last block has its own."""
    torch.manual_seed(0)
    weight = (torch.randn(shape) * torch.logspace(-3, 3, shape[1])).to(dtype)
    blocks = round_to_int8(weight)
    error = (values_of(blocks) - weight.double()).abs()
    for first in range(0, shape[1], 32):
        columns = slice(first, first + 32)
        half_step = weight[:, columns].double().abs().amax(1, keepdim=True) / 254
        assert bool((error[:, columns] <= half_step * (1 + 1e-4)).all())
    assert np.abs(blocks.codes_NK).max() == 127


def test_blocks_of_zeros_and_of_subnormals_become_zero() -> None:
    """No division by zero, no code that wraps around."""
    weight = torch.cat((torch.zeros(1, 32), torch.full((1, 32), -3e-43), torch.ones(1, 32)))
    found = values_of(round_to_int8(weight))
    assert not found[:2].any()
    torch.testing.assert_close(found[2], torch.ones(32).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("in_features", [64, 40])
def test_panels_hold_the_rounded_weight(in_features: int) -> None:
    """Look-ups are the codes times the scales, products those of that matrix."""
    torch.manual_seed(1)
    blocks = round_to_int8(torch.randn(70, in_features))
    weight = PanelWeight(70, in_features)
    weight.store_quantised(0, blocks)
    values = values_of(blocks)
    assert torch.equal(weight.columns(torch.arange(70)), values.float())
    x = torch.randn(5, in_features)
    exact = x.double() @ values.T
    torch.testing.assert_close(weight.product(x).double(), exact, rtol=0, atol=2e-5)


def load(path: Path, **options: object) -> LoadedModel:
    config = WorkerConfig(**options)  # type: ignore[arg-type]
    return load_model(ModelFiles(path=path, name="tiny"), config, lambda *_: None)


def logits(loaded: LoadedModel, family: str) -> Tensor:
    steps = PagedSteps(loaded.model, kv_pool(tiny_model(family), len(IDS), 16))
    sequence = PagedSequence(IDS)
    return torch.cat([steps.step([(sequence, count)])[0] for count in COUNTS])


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_near_float32s(family: str, tied: bool, tmp_path: Path) -> None:
    """Rounding shows, and moves logits by less than 5 % of their spread.

    Random models with sharp attention pass errors on far more than trained ones do.
    """
    reference = tiny_model(family, tied=tied)
    save_tiny(reference, tmp_path)
    exact = reference_logits(reference, IDS)
    found = logits(load(tmp_path, quantization="int8"), family)
    error = float((found - exact).square().mean().sqrt() / exact.std())
    assert 1e-4 < error < 0.05


def rounded_in_float64(weight_NK: Tensor) -> Tensor:
    """What int8 blocks hold, computed block by block."""
    weight_NK = weight_NK.double()
    for block_NB in weight_NK.split(32, dim=1):
        step_N1 = block_NB.abs().amax(1, keepdim=True) / 127
        block_NB.copy_((block_NB / step_N1).round() * step_N1)
    return weight_NK


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_product_has_the_rounded_weights(family: str, tmp_path: Path) -> None:
    """transformers with the same matrices rounded gives the same logits as float32 does."""
    save_tiny(tiny_model(family), tmp_path)
    rounded = deepcopy(tiny_model(family))
    for name, parameter in rounded.named_parameters():
        if parameter.ndim == 2 and "embed_tokens" not in name:
            parameter.data.copy_(rounded_in_float64(parameter.data))
    found = logits(load(tmp_path, quantization="int8"), family)
    assert float((found - reference_logits(rounded, IDS)).abs().max()) < 3e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_norms_biases_and_looked_up_rows_stay_exact(
    tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Only what is multiplied is rounded; a tied embedding keeps the checkpoint's own rows."""
    save_tiny(tiny_model.__wrapped__("qwen2", tied=tied).to(dtype), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = load(tmp_path, quantization="int8")
    table = stored["model.embed_tokens.weight"]
    ids = torch.arange(len(table))
    assert torch.equal(loaded.model.embedding.forward(ids), table.float())
    assert torch.equal(loaded.model.norm.weight, stored["model.norm.weight"].float())
    name = "model.layers.0.self_attn.q_proj.bias"
    bias = loaded.model.layers[0].qkv.weight.bias_N
    assert torch.equal(bias[: len(stored[name])], stored[name].float())
    head = loaded.model.head.weight.columns(ids)
    expected = round_to_int8(table if tied else stored["lm_head.weight"])
    assert torch.equal(head, values_of(expected).float())


def test_bytes_by_form(tmp_path: Path) -> None:
    """Nine bits a weight that is multiplied, the rest as it is; the log says so."""
    reference = tiny_model("llama", tied=True)
    save_tiny(reference, tmp_path)
    sizes = {name: p for name, p in reference.named_parameters()}
    matrices = [p for p in sizes.values() if p.ndim == 2]
    blocks = sum(p.numel() + 4 * p.shape[0] * -(-p.shape[1] // 32) for p in matrices)
    table = 4 * sizes["model.embed_tokens.weight"].numel()
    norms = 4 * sum(p.numel() for p in sizes.values() if p.ndim == 1)
    loaded = load(tmp_path, quantization="int8")
    assert loaded.bytes_by_form == {"8-bit blocks": blocks, "float32": table + norms}
    assert loaded.weight_bytes == blocks + table + norms
    text = weights_text({"8-bit blocks": 3 * 2**20, "float32": 2**19})
    assert text == "weights: 3.5 MiB: 3.0 MiB as 8-bit blocks, 512.0 KiB as float32"


def test_gguf_blocks_stay_and_floats_are_rounded(tmp_path: Path) -> None:
    """Q4_1 tensors keep their codes; the floats beside them are rounded."""
    reference = tiny_model("llama", num_heads=8)  # 128 features: whole blocks
    quantised = write_model(reference, tmp_path / "q.gguf", GGMLQuantizationType.Q4_1)
    floats = write_model(reference, tmp_path / "f.gguf")
    assert "8-bit blocks" not in load(quantised).bytes_by_form
    as_it_is = load(quantised).bytes_by_form["4-bit blocks"]
    assert load(quantised, quantization="int8").bytes_by_form["4-bit blocks"] == as_it_is
    assert set(load(floats, quantization="int8").bytes_by_form) == {"8-bit blocks", "float32"}


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    """Rounding a block with an infinity would make all of it NaN."""
    save_tiny(tiny_model("llama"), tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name][3, 5] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(StartupError, match=f"{name}: weights that are not finite"):
        load(tmp_path, quantization="int8")


def test_a_gpu_that_auto_finds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says how to run on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(StartupError, match=r"int8 is for the CPU.*--device cpu"):
        choose_device(WorkerConfig(quantization="int8"))
    assert choose_device(WorkerConfig(quantization="int8", device="cpu")).type == "cpu"
