"""Loading: every layout of a Hugging Face folder, dummy weights, and files that do not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_steps import PagedSequence, PagedSteps
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, reference_logits, save_tiny, tiny_model
from torch import Tensor

from cearx.core.child import StartupError
from cearx.core.config import ModelFiles, WorkerConfig
from cearx.worker.kv_cache import KVCache
from cearx.worker.model_config import UnsupportedModel
from cearx.worker.model_loader import LoadedModel, load_model
from cearx.worker.models import registry
from cearx.worker.models.llama import LlamaForCausalLM
from cearx.worker.weights import WeightMismatch

IDS = list(range(3, 33))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(path: Path, **options: Any) -> LoadedModel:
    files = ModelFiles(path=path, name="tiny")
    return load_model(files, WorkerConfig(**options), lambda *_: None)


def logits(loaded: LoadedModel) -> Tensor:
    kv_cache = KVCache(loaded.config, 8, 16, loaded.dtype)
    return PagedSteps(loaded.model, kv_cache).step([(PagedSequence(IDS), len(IDS))])[0]


def assert_same(loaded: LoadedModel, expected: Tensor) -> None:
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-4)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_embedding_models_need_no_output_layer(architecture: str, tmp_path: Path) -> None:
    """Neither weights nor memory of one; a checkpoint that has one loses it, others miss it."""
    reference = tiny_model("qwen3", tied=False)
    save_tiny(reference, tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    files = ModelFiles(path=tmp_path, name="tiny", task="embed")
    with_head = load_model(files, WorkerConfig(), lambda *_: None)

    def strip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["lm_head.weight"]
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    rewrite(tmp_path, strip)
    without = load_model(files, WorkerConfig(), lambda *_: None)
    assert with_head.weight_bytes == without.weight_bytes
    assert torch.equal(logits(with_head), logits(without))
    with pytest.raises(StartupError):
        load(tmp_path)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [False, True])
def test_folder(family: str, tied: bool, shards: bool, tmp_path: Path) -> None:
    """Single and sharded folders of every family, tied or not, give the reference's logits."""
    reference = tiny_model(family, tied=tied)
    save_tiny(reference, tmp_path, max_shard_size="40KB" if shards else "1GB")
    assert (tmp_path / "model.safetensors").exists() != shards
    loaded = load(tmp_path)
    assert loaded.dtype == torch.float32
    assert loaded.weight_bytes == 4 * sum(p.numel() for p in reference.parameters())
    assert_same(loaded, reference_logits(reference, IDS))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_low_precision_source(source: torch.dtype, tmp_path: Path) -> None:
    """16-bit files are computed in float32 by default, without another rounding."""
    save_tiny(tiny_model.__wrapped__("qwen3").to(source), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.norm.weight"].dtype == source
    reference = tiny_model.__wrapped__("qwen3")
    reference.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    assert_same(load(tmp_path), reference_logits(reference, IDS))


def test_wanted_dtype(tmp_path: Path) -> None:
    """`--dtype bfloat16` rounds weights and activations."""
    reference = tiny_model("llama")
    loaded = load(save_tiny(reference, tmp_path), dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    error = (logits(loaded) - reference_logits(reference, IDS)).abs().max()
    assert 1e-3 < float(error) < 2.0


def test_names_without_prefix(tmp_path: Path) -> None:
    """Tensors named without `model.` are the same tensors."""
    reference = tiny_model("qwen2", tied=False)
    save_tiny(reference, tmp_path)
    rewrite(tmp_path, lambda t: {name.removeprefix("model."): v for name, v in t.items()})
    assert_same(load(tmp_path), reference_logits(reference, IDS))


def test_harmless_extra_tensors(tmp_path: Path) -> None:
    """A doubled tied head and stored rotary frequencies are passed over."""
    reference = tiny_model("llama", tied=True)
    save_tiny(reference, tmp_path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(
        tmp_path,
        lambda t: {**t, **extra, "lm_head.weight": t["model.embed_tokens.weight"].clone()},
    )
    assert_same(load(tmp_path), reference_logits(reference, IDS))


def _without_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in tensors.items() if k != "model.norm.weight"}


def _with_stranger(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "model.layers.0.self_attn.q_proj.bias": torch.ones(96)}


def _misshapen(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "model.layers.1.mlp.up_proj.weight": torch.ones(3, 96)}


def _integers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "model.norm.weight": torch.ones(96, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_norm, r"missing: model.norm.weight \[96\]"),
        (_with_stranger, r"unexpected: model.layers.0.self_attn.q_proj.bias \[96\]"),
        (
            _misshapen,
            r"model.layers.1.mlp.up_proj.weight: file \[3, 96\], model \[200, 96\]",
        ),
        (_integers, r"model.norm.weight: torch.int32 is not a float type"),
    ],
)
def test_mismatch_is_listed(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, tmp_path: Path
) -> None:
    """Missing, unexpected, misshapen and non-float tensors are named, with their shapes."""
    save_tiny(tiny_model("llama"), tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(WeightMismatch, match=message):
        load(tmp_path)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    """Another model's file does not fill the screen."""
    save_tiny(tiny_model("llama"), tmp_path)
    rewrite(tmp_path, lambda t: {"model.norm.weight": t["model.norm.weight"]})
    with pytest.raises(WeightMismatch, match=r"and \d+ more$") as caught:
        load(tmp_path)
    assert str(caught.value).count("missing") == 8


def _edit_config(folder: Path, **change: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def test_unusable_folders(tmp_path: Path) -> None:
    """What is absent or damaged is one clear start-up error that names the file."""
    with pytest.raises(StartupError, match=r"config.json: .*No such file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartupError, match=r"config.json"):
        load(tmp_path)
    save_tiny(tiny_model("llama"), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(StartupError, match=r"model.safetensors"):
        load(tmp_path)
    weights.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(StartupError, match=r"neither model.safetensors nor"):
        load(tmp_path)
    _edit_config(tmp_path, architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModel, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        load(tmp_path)


@pytest.mark.parametrize("shard", ["../model.safetensors", "absent.safetensors"])
def test_index_names_only_files_of_the_folder(shard: str, tmp_path: Path) -> None:
    """An index cannot reach outside its folder, and a missing shard is named."""
    folder = save_tiny(tiny_model("llama"), tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartupError, match="which is not a file of"):
        load(folder)


def test_load_format_must_match(tmp_path: Path) -> None:
    """A format that the path cannot have is refused."""
    with pytest.raises(StartupError, match=r"gguf needs a file \.gguf"):
        load(tmp_path, load_format="gguf")
    with pytest.raises(StartupError, match=r"safetensors needs a folder"):
        load(tmp_path / "model.gguf", load_format="safetensors")


def test_dummy_weights(tmp_path: Path) -> None:
    """Dummy weights need config.json only, follow the seed, and give logits of a sane scale."""
    save_tiny(tiny_model("qwen3"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first = logits(load(tmp_path, load_format="dummy", seed=1))
    assert torch.equal(first, logits(load(tmp_path, load_format="dummy", seed=1)))
    assert not torch.allclose(first, logits(load(tmp_path, load_format="dummy", seed=2)))
    assert 0.3 < float(first.std()) < 3.0
    assert len(set(first.argmax(-1).tolist())) > 5


def test_progress_ends_complete(tmp_path: Path) -> None:
    """Progress counts every tensor once."""
    save_tiny(tiny_model("llama"), tmp_path)
    seen: list[tuple[int, int]] = []
    load_model(
        ModelFiles(path=tmp_path, name="tiny"),
        WorkerConfig(),
        lambda done, total: seen.append((done, total)),
    )
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]
    assert len(seen) == len(tiny_model("llama").state_dict())


def test_models_from_other_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An entry point of group cearx.models adds an architecture; built-in names win."""

    class Entry:
        def load(self) -> type[LlamaForCausalLM]:
            return LlamaForCausalLM

    class Entries:
        names = ("OtherForCausalLM",)

        def select(self, name: str) -> list[Entry]:
            return [Entry()] if name in self.names else []

    monkeypatch.setattr(registry, "entry_points", lambda group: Entries())
    reference = tiny_model("llama")
    save_tiny(reference, tmp_path)
    _edit_config(tmp_path, architectures=["OtherForCausalLM"])
    assert_same(load(tmp_path), reference_logits(reference, IDS))
    with pytest.raises(UnsupportedModel, match=r"ThirdForCausalLM.*Qwen3.*OtherForCausalLM"):
        registry.find_model("ThirdForCausalLM")
