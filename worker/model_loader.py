"""From a model's files to a model that can compute.

Owns the choice of format, type and class; reading is done by one weight source per format, the fit
is checked by `weights.py`. Never runs code that comes with a model. Called once by the process.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from cearx.core.child import StartupError
from cearx.core.config import ModelFiles, WorkerConfig
from cearx.core.gguf_file import GGUFFile
from cearx.worker.gguf_loader import GGUFWeights, gguf_model_config
from cearx.worker.model_config import ModelConfig, from_hf_config, hf_architecture
from cearx.worker.models.interface import LanguageModel
from cearx.worker.models.registry import find_model
from cearx.worker.safetensors_folder import SafetensorsFolder
from cearx.worker.tensor_parallel import SingleRank
from cearx.worker.weights import DummyWeights, WeightSlot, WeightSource, fill_slots, type_name

CONFIG_FILE = "config.json"
GGUF_SUFFIX = ".gguf"
GGUF_POOLING = (0, 3)
"""Of llama.cpp's `pooling_type`, where there is one: none and last token."""
BASE_MODELS = {
    "LlamaModel": "LlamaForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
}
"""What checkpoints without an output layer call their architecture; they make embeddings only."""
DTYPES = {
    "auto": torch.float32,  # exact, and the only type that every CPU computes fast
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""Old checkpoints store RoPE's frequencies, which follow from the config."""
TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True, eq=False)
class LoadedModel:
    model: LanguageModel
    config: ModelConfig
    dtype: torch.dtype
    """Of weights, activations and KV."""
    bytes_by_form: Mapping[str, int]
    """Of the weights: quantised blocks and float types, largest first."""

    @property
    def weight_bytes(self) -> int:
        return sum(self.bytes_by_form.values())


def load_model(
    files: ModelFiles, config: WorkerConfig, on_progress: Callable[[int, int], None]
) -> LoadedModel:
    """Loads the model; `on_progress` gets tensors done and tensors in all.

    Raises StartupError (UnsupportedModel, WeightMismatch and others) for files that cannot be used.
    """
    checkpoint = open_checkpoint(files, config)
    dtype = DTYPES[config.dtype]
    try:
        model = checkpoint.model_type(checkpoint.config, dtype, SingleRank())
    except (RuntimeError, MemoryError) as error:
        raise StartupError(f"no memory for the weights of {files.name}: {error}") from error
    slots = model.weight_slots()
    quantised = fill_from(
        checkpoint, slots, config, torch.device("cpu"), torch.float32, on_progress
    )
    return LoadedModel(model, checkpoint.config, dtype, bytes_by_form(slots, quantised, dtype))


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model's files, with its shape read and its weights not."""

    path: Path
    gguf: GGUFFile | None
    """None for a Hugging Face folder."""
    config: ModelConfig
    model_type: type[LanguageModel]


def open_checkpoint(files: ModelFiles, config: WorkerConfig) -> Checkpoint:
    """Reads the shape; raises StartupError for files that cannot be used."""
    _check_format(files.path, config.load_format)
    is_embed = files.task == "embed"
    gguf = GGUFFile(files.path) if files.path.suffix == GGUF_SUFFIX else None
    model_config, model_type = _describe(files.path, gguf, BASE_MODELS if is_embed else {})
    if is_embed:
        if gguf is not None:
            _check_pooling(gguf)
        # Nobody asks for its logits; checkpoints of embedding models have no output layer.
        model_config = msgspec.structs.replace(model_config, tie_word_embeddings=True)
    return Checkpoint(files.path, gguf, model_config, model_type)


def fill_from(
    checkpoint: Checkpoint,
    slots: Mapping[str, WeightSlot],
    config: WorkerConfig,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None],
) -> dict[str, dict[str, int]]:
    """Fills a model's slots; returns the bytes of tensors kept quantised, by name and form.

    Random weights are drawn, and safetensors read, on `device`; `dtype` is that of random weights
    before they are stored.
    """
    source: WeightSource
    if config.load_format == "dummy":
        source = DummyWeights(slots, config.seed, device, dtype)
    elif checkpoint.gguf is not None:
        source = GGUFWeights(checkpoint.gguf)
    else:
        source = SafetensorsFolder(checkpoint.path, str(device))
    tied = checkpoint.config.tie_word_embeddings
    return fill_slots(
        slots,
        source,
        ignored=lambda name: name.endswith(IGNORED_SUFFIX) or (tied and name == TIED_HEAD),
        on_progress=on_progress,
        int8=config.quantization == "int8",
    )


def _check_pooling(gguf: GGUFFile) -> None:
    kind = gguf.get(f"{gguf.get('general.architecture')}.pooling_type")
    if not (kind is None or (isinstance(kind, int) and kind in GGUF_POOLING)):
        raise StartupError(
            f"{gguf.path} has pooling_type {kind}, which is not supported; supported: 3 (last)"
        )


def _check_format(path: Path, load_format: str) -> None:
    is_gguf = path.suffix == GGUF_SUFFIX
    if load_format == "gguf" and not is_gguf:
        raise StartupError(f"--load-format gguf needs a file {GGUF_SUFFIX}, got {path}")
    if load_format == "safetensors" and is_gguf:
        raise StartupError(f"--load-format safetensors needs a folder, got {path}")


def _describe(
    path: Path, gguf: GGUFFile | None, aliases: Mapping[str, str]
) -> tuple[ModelConfig, type[LanguageModel]]:
    """`aliases`: architectures that count as others."""
    if gguf is not None:
        model_config = gguf_model_config(gguf)
        return model_config, find_model(model_config.architecture)
    config_path = path / CONFIG_FILE
    try:
        raw: Mapping[str, Any] = msgspec.json.decode(config_path.read_bytes(), type=dict[str, Any])
        architecture = hf_architecture(raw)
        raw = {**raw, "architectures": [aliases.get(architecture, architecture)]}
        model_type = find_model(hf_architecture(raw))
        return from_hf_config(raw, model_type.family), model_type
    except (OSError, ValueError) as error:
        raise StartupError(f"{config_path}: {error}") from error


def bytes_by_form(
    slots: Mapping[str, WeightSlot],
    quantised: Mapping[str, Mapping[str, int]],
    dtype: torch.dtype,
) -> dict[str, int]:
    """Bytes of all weights, largest first: as `quantised` or the slot says, else of `dtype`."""
    totals: Counter[str] = Counter()
    for name, slot in slots.items():
        floats = torch.Size(slot.shape).numel() * dtype.itemsize
        totals.update(quantised.get(name) or slot.kept_as or {type_name(dtype): floats})
    return dict(totals.most_common())
