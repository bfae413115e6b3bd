"""From a step plan to the model's inputs: token ids, positions, block tables and slots.

Owns the static buffers that every step's inputs are written to; what it returns are views that hold
until the next step. Never changes a request. Called by the step runner.
Legend: T tokens of the step, D decodes, N requests of the step, R rows with logits, S seats,
B blocks of the longest request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cearx.core.events import PrefillChunk, StepPlan
from cearx.worker.attention import AttentionMetadata
from cearx.worker.request_states import RequestState, RequestStates


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """What one forward pass takes, and whose tokens are sampled from it."""

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    metadata: AttentionMetadata
    """Its rows are the N requests."""
    logits_indices_R: torch.Tensor
    """Indices into T of the tokens whose logits are needed."""
    sampled: Sequence[RequestState]
    """The request of each row of logits: decodes first, then the chunks that sample."""


class BatchInputsBuilder:
    """Writes a plan's inputs into buffers of the largest size that a step can have.

    The tokens of a step lie in one row, decodes first:

    input_ids_T   | d0 | d1 | ... | chunk 0 ...... | chunk 1 .. |
    cu_seqlens_q  0    1    2     D            D + n0     D + n0 + n1
    """

    def __init__(
        self, states: RequestStates, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._states = states
        self._input_ids_T = np.zeros(max_num_batched_tokens, np.int64)
        self._positions_T = np.zeros(max_num_batched_tokens, np.int64)
        self._slots_T = np.zeros(max_num_batched_tokens, np.int64)
        self._cu_seqlens_q = np.zeros(max_num_seqs + 1, np.int64)
        self._seq_lens_N = np.zeros(max_num_seqs, np.int64)
        self._one_each_D = np.arange(max_num_seqs + 1)

    def build(self, plan: StepPlan) -> BatchInputs:
        """The inputs of a plan with at least one decode or chunk."""
        seats_table = self._states.seats
        decoding = [self._states[request_id] for request_id in plan.decodes]
        prefilling = [self._states[chunk.request_id] for chunk in plan.chunks]
        num_decodes, num_seqs = len(decoding), len(decoding) + len(prefilling)
        seats_N = np.array([s.seat for s in decoding] + [s.seat for s in prefilling], np.intp)
        self._cu_seqlens_q[: num_decodes + 1] = self._one_each_D[: num_decodes + 1]
        self._write_decodes(seats_N[:num_decodes])
        num_tokens = num_decodes
        for i_seq, chunk in enumerate(plan.chunks, start=num_decodes):
            end = num_tokens + chunk.num_tokens
            self._write_chunk(chunk, prefilling[i_seq - num_decodes], num_tokens, end)
            self._seq_lens_N[i_seq] = chunk.start + chunk.num_tokens
            self._cu_seqlens_q[i_seq + 1] = num_tokens = end
        seq_lens_N = self._seq_lens_N[:num_seqs]
        num_blocks_N = -(-seq_lens_N // seats_table.block_size)
        assert (num_blocks_N <= seats_table.num_blocks_S[seats_N]).all(), (
            f"step {plan.step_id}: a request has fewer blocks than its tokens need"
        )
        self._write_slots(seats_N, num_tokens)
        samples_N = [True] * num_decodes + [chunk.samples for chunk in plan.chunks]
        metadata = AttentionMetadata(
            num_decodes=num_decodes,
            cu_seqlens_q=torch.from_numpy(self._cu_seqlens_q[: num_seqs + 1]),
            seq_lens=torch.from_numpy(seq_lens_N),
            block_tables=torch.from_numpy(
                seats_table.block_table_SB[seats_N, : int(num_blocks_N.max())]
            ),
            slot_mapping=torch.from_numpy(self._slots_T[:num_tokens]),
        )
        last_tokens_N = self._cu_seqlens_q[1 : num_seqs + 1] - 1
        return BatchInputs(
            input_ids_T=torch.from_numpy(self._input_ids_T[:num_tokens]),
            positions_T=torch.from_numpy(self._positions_T[:num_tokens]),
            metadata=metadata,
            logits_indices_R=torch.from_numpy(last_tokens_N[samples_N]),
            sampled=decoding
            + [s for s, chunk in zip(prefilling, plan.chunks, strict=True) if chunk.samples],
        )

    def _write_decodes(self, seats_D: NDArray[np.intp]) -> None:
        seats_table, num_decodes = self._states.seats, len(seats_D)
        seq_lens_D = seats_table.num_tokens_S[seats_D]
        self._input_ids_T[:num_decodes] = seats_table.last_token_S[seats_D]
        self._positions_T[:num_decodes] = seq_lens_D - 1
        self._seq_lens_N[:num_decodes] = seq_lens_D

    def _write_chunk(self, chunk: PrefillChunk, state: RequestState, begin: int, end: int) -> None:
        """Writes a chunk to tokens [begin, end) of the step."""
        chunk_end = chunk.start + chunk.num_tokens
        assert chunk.samples == (chunk_end == state.num_tokens), (
            f"request {chunk.request_id}: a chunk to token {chunk_end} of {state.num_tokens} "
            f"says samples={chunk.samples}"
        )
        self._input_ids_T[begin:end] = state.tokens(chunk.start, chunk_end)
        self._positions_T[begin:end] = np.arange(chunk.start, chunk_end)

    def _write_slots(self, seats_N: NDArray[np.intp], num_tokens: int) -> None:
        """slot = block of the token's position * block_size + offset in the block."""
        seats_table = self._states.seats
        lengths_N = np.diff(self._cu_seqlens_q[: len(seats_N) + 1])
        block_index_T, offset_T = np.divmod(self._positions_T[:num_tokens], seats_table.block_size)
        blocks_T = seats_table.block_table_SB[np.repeat(seats_N, lengths_N), block_index_T]
        self._slots_T[:num_tokens] = blocks_T * seats_table.block_size + offset_T
