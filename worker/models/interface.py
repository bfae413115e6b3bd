"""What the worker's loop and the loader expect of a model, built in or from another package.

Owns the two protocols and nothing else. A model is found by architecture name (`registry.py`),
constructed empty, filled by the loader through its weight slots, then called once a step.

T tokens of the step, R sampled rows, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cearx.worker.attention import AttentionMetadata
from cearx.worker.kv_cache import KVCache
from cearx.worker.model_config import ModelConfig
from cearx.worker.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class WeightSlot:
    """A place for one tensor of a checkpoint."""

    shape: tuple[int, ...]
    """Shape of the whole tensor, as it stands in the checkpoint."""
    fill: Callable[[Tensor], None]
    """Takes the whole tensor in any float type and keeps this rank's share of it."""


class LanguageModel(Protocol):
    """A decoder that reads and writes paged KV. Call it inside `torch.inference_mode()`."""

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
