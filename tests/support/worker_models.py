"""The worker's models filled from a transformers model in memory, without any file."""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cearx.worker.kv_cache import KVCache
from cearx.worker.model_config import ModelConfig, from_hf_config
from cearx.worker.models.interface import LanguageModel
from cearx.worker.models.registry import find_model
from cearx.worker.tensor_parallel import SingleRank, TensorParallel
from cearx.worker.weights import fill_slots


class StateDictSource:
    """A transformers model's own tensors as a weight source."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors = dict(model.state_dict())

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


def worker_config(reference: PreTrainedModel) -> ModelConfig:
    architecture = type(reference).__name__
    return from_hf_config({**reference.config.to_dict(), "architectures": [architecture]})


def worker_model(
    reference: PreTrainedModel, dtype: torch.dtype = torch.float32, tp: TensorParallel | None = None
) -> LanguageModel:
    config = worker_config(reference)
    model = find_model(config.architecture)(config, dtype, tp or SingleRank())
    fill_slots(
        model.weight_slots(),
        StateDictSource(reference),
        ignored=lambda name: config.tie_word_embeddings and name == "lm_head.weight",
        on_progress=lambda *_: None,
    )
    return model


def kv_pool(
    reference: PreTrainedModel,
    num_tokens: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    num_kv_heads: int | None = None,
) -> KVCache:
    """Room for `num_tokens` tokens of one sequence or a few blocks less of several."""
    num_blocks = -(-num_tokens // block_size) + 4
    return KVCache(worker_config(reference), num_blocks, block_size, dtype, num_kv_heads)
