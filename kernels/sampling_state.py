"""What sampling reads and writes on the device: a table by seat, and scratch memory.

Owns the layout, allocated once at the largest size; never launches anything. Built by the worker,
used by `sampling`. The last seat is the spare one, whose rows fill up a batch.
Legend: S seats with the spare one, R rows, V vocabulary, L tiles of a row, C candidates.
"""

from dataclasses import dataclass

import torch
import triton

TILE = 2048
"""Logits of one program."""
SPAN = 64
"""Neighbouring logits of which the largest is kept, to bound the k-th largest of all."""
MAX_CANDIDATES = 4096
"""Of a row's filter; a row with more reads all its logits several times instead."""


@dataclass(frozen=True)
class SamplingTable:
    """A request's sampling parameters and progress, at its seat."""

    temperature_S: torch.Tensor
    """float32; 0 is greedy."""
    top_k_S: torch.Tensor
    """int32; 0 keeps all."""
    top_p_S: torch.Tensor
    """float32; 1 keeps all."""
    min_p_S: torch.Tensor
    """float32; 0 keeps all."""
    seed_S: torch.Tensor
    """int64."""
    num_outputs_S: torch.Tensor
    """int32; tokens sampled so far, which numbers the next one's noise."""
    num_tokens_S: torch.Tensor
    """int32; known tokens, prompt included."""
    last_token_S: torch.Tensor
    """int32."""

    @classmethod
    def allocate(cls, num_seats: int, device: torch.device) -> "SamplingTable":
        """For `num_seats` seats, the spare one included; all greedy, with one token each."""

        def full(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((num_seats,), value, dtype=dtype, device=device)

        return cls(
            temperature_S=full(0, torch.float32),
            top_k_S=full(0, torch.int32),
            top_p_S=full(1, torch.float32),
            min_p_S=full(0, torch.float32),
            seed_S=full(0, torch.int64),
            num_outputs_S=full(0, torch.int32),
            num_tokens_S=full(1, torch.int32),
            last_token_S=full(0, torch.int32),
        )


@dataclass(frozen=True)
class SamplingScratch:
    """What the stages of sampling hand to each other; a row's content is of no use afterwards."""

    peak_RL: torch.Tensor
    """float32; each tile's largest logit, +inf for NaN."""
    logit_RL: torch.Tensor
    """float32; of the tile's winner, like the next two."""
    noise_RL: torch.Tensor
    winner_RL: torch.Tensor
    mass_RL: torch.Tensor
    """float32; the tile's sum of weights, relative to its own peak."""
    span_max: torch.Tensor
    """float32 [R, L * TILE / SPAN]."""
    bound_R: torch.Tensor
    """int32; the order key that candidates reach."""
    total_R: torch.Tensor
    """float32; the row's sum of weights, relative to its peak."""
    num_candidates_R: torch.Tensor
    candidate_logit_RC: torch.Tensor
    candidate_id_RC: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, vocab_size: int, device: torch.device) -> "SamplingScratch":
        """For batches of up to `max_rows` rows."""
        tiles = triton.cdiv(vocab_size, TILE)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(max_rows, *shape, dtype=dtype, device=device)

        return cls(
            peak_RL=empty(tiles),
            logit_RL=empty(tiles),
            noise_RL=empty(tiles),
            winner_RL=empty(tiles, dtype=torch.int32),
            mass_RL=empty(tiles),
            span_max=empty(tiles * TILE // SPAN),
            bound_R=empty(dtype=torch.int32),
            total_R=empty(),
            num_candidates_R=empty(dtype=torch.int32),
            candidate_logit_RC=empty(MAX_CANDIDATES),
            candidate_id_RC=empty(MAX_CANDIDATES, dtype=torch.int32),
        )
