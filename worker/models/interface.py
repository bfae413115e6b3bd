"""What the worker's loop and the loader expect of a model, built in or from another package.

Owns the protocol and nothing else. A model is found by architecture name (`registry.py`),
constructed empty, filled by the loader through its weight slots, then called once a step.

T tokens of the step, E hidden size, R rows with logits, V vocabulary.
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

    def hidden_states(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Computes one step and returns the last layer's output [T, E].

        Tokens of all rows are concatenated as `metadata` says: decodes (one token each) first, then
        prefill chunks, each with any start whose earlier tokens are in the KV cache already.
        `input_ids_T` and `positions_T` (position within the request, from 0) are int64. Writes the
        KV of every token to `metadata.slot_mapping`.
        """
        ...

    def logits(self, x_RE: Tensor) -> Tensor:
        """Logits [R, V] in float32 of rows of `hidden_states`; they may be changed in place."""
        ...

    def final_norm(self, x_RE: Tensor) -> Tensor:
        """Rows of `hidden_states` behind the final norm [R, E]: what `logits` multiplies."""
        ...

    def head_rows(self, token_ids_T: Tensor) -> Tensor:
        """Rows [T, E] of the matrix that makes logits, for tokens (int64)."""
        ...

    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        logits_indices_R: Tensor,
    ) -> Tensor:
        """`logits` of the rows `logits_indices_R` (int64) of `hidden_states`.

        These are the tokens whose logits are needed, usually the last of each sampling row.
        """
        ...
