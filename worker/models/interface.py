"""What the worker's loop and the loader expect of a model, built in or from another package.

Owns the protocol and nothing else. A model is found by architecture name (`registry.py`),
constructed empty, filled by the loader through its weight slots, then called once a step.

T tokens of the step, R sampled rows, V vocabulary.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from cearx.worker.attention import AttentionMetadata
from cearx.worker.kv_cache import KVCache
from cearx.worker.model_config import Family, ModelConfig
from cearx.worker.tensor_parallel import TensorParallel
from cearx.worker.weights import WeightSlot


class LanguageModel(Protocol):
    """A decoder that reads and writes paged KV. Call it inside `torch.inference_mode()`."""

    family: Family
    """What the architecture fixes that config.json does not say."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, tp: TensorParallel) -> None:
        """Allocates weights without filling them."""
        ...

    def weight_slots(self) -> Mapping[str, WeightSlot]:
        """By checkpoint name (Hugging Face's); every slot must be filled before `forward`."""
        ...

    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        logits_indices_R: Tensor,
    ) -> Tensor:
        """Computes one step and returns logits [R, V] in float32.

        Tokens of all rows are concatenated as `metadata` says: decodes (one token each) first, then
        prefill chunks, each with any start whose earlier tokens are in the KV cache already.
        `input_ids_T`, `positions_T` (position within the request, from 0) and `logits_indices_R`
        (which tokens need logits, usually the last of each sampling row) are int64. Writes the KV
        of every token to `metadata.slot_mapping`. The result may be changed in place.
        """
        ...
