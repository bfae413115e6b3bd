"""From a plan's decodes and chunks to the tensors of one forward pass over both.

Owns the host's arithmetic of positions, slots and lengths of prefill chunks; the decodes' are
computed on the device, because only it knows their last tokens. Called by the runner for every step
that is not a captured decode.
Legend: T tokens, D decodes, C chunks, R rows that sample, S seats, M blocks of a seat.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cearx.kernels.step_inputs import prepare_decode
from cearx.worker.cuda.decode_group import DecodeGroup
from cearx.worker.cuda.decoder import StepTensors
from cearx.worker.cuda.device_batch import DeviceBatch
from cearx.worker.cuda.staging import InputStaging
from cearx.worker.request_states import RequestState
from cearx.worker.seats import SeatTable


@dataclass(frozen=True, slots=True, eq=False)
class ChunkWork:
    """Tokens [start, end) of a request; `samples` says whether the next token is drawn behind."""

    state: RequestState
    start: int
    end: int
    samples: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def halves(self) -> "tuple[ChunkWork, ChunkWork]":
        """The same work in two parts, to be done one after the other."""
        middle = (self.start + self.end) // 2
        return (
            ChunkWork(self.state, self.start, middle, False),
            ChunkWork(self.state, middle, self.end, self.samples),
        )


@dataclass(frozen=True, slots=True, eq=False)
class BuiltStep:
    """A forward pass, the seats of its sampling rows (int32) and whose they are."""

    tensors: StepTensors
    sampled_seats_R: Tensor
    sampled: tuple[RequestState, ...]


def build_step(
    decodes: DecodeGroup,
    chunks: Sequence[ChunkWork],
    batch: DeviceBatch,
    seats: SeatTable,
    staging: InputStaging,
) -> BuiltStep:
    """Packs the inputs and the batch's changes, sends them and lets the device complete them."""
    num_decodes = len(decodes.seats_D)
    lengths_C = np.array([chunk.num_tokens for chunk in chunks], np.int32)
    num_tokens = num_decodes + int(lengths_C.sum())
    input_ids_T = np.zeros(num_tokens, np.int64)
    positions_T = np.zeros(num_tokens, np.int64)
    slots_T = np.zeros(num_tokens, np.int64)
    pack_chunks(chunks, seats, num_decodes, input_ids_T, positions_T, slots_T)
    cu_seqlens_q = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths_C, out=cu_seqlens_q[1:])
    samples_C = np.array([chunk.samples for chunk in chunks], bool)
    ends_C = num_decodes + cu_seqlens_q[1:].astype(np.int64) - 1
    seats_C = np.array([chunk.state.seat for chunk in chunks], np.int32)
    sampled_seats_R = np.concatenate((decodes.seats_D, seats_C[samples_C]))
    staging.begin()
    tensors = StepTensors(
        input_ids_T=staging.put(input_ids_T),
        positions_T=staging.put(positions_T),
        slots_T=staging.put(slots_T),
        block_tables_SM=batch.block_tables_SM,
        seats_D=staging.put(decodes.seats_D),
        seq_lens_D=staging.put(np.zeros(num_decodes, np.int32)),
        seats_C=staging.put(seats_C) if chunks else None,
        cu_seqlens_q=staging.put(cu_seqlens_q) if chunks else None,
        seq_lens_C=staging.put(np.array([chunk.end for chunk in chunks], np.int32)),
        max_chunk_len=int(lengths_C.max(initial=0)),
        logits_indices_R=staging.put(
            np.concatenate((np.arange(num_decodes), ends_C[samples_C])).astype(np.int64)
        ),
    )
    sampled_seats_device_R = staging.put(sampled_seats_R)
    changes = batch.pack(staging)
    staging.send()
    batch.apply(changes)
    if num_decodes:
        prepare_decodes(tensors, batch, seats.block_size)
    sampled = (*decodes.states, *(chunk.state for chunk in chunks if chunk.samples))
    return BuiltStep(tensors, sampled_seats_device_R, sampled)


def pack_chunks(
    chunks: Sequence[ChunkWork],
    seats: SeatTable,
    first: int,
    input_ids_T: NDArray[np.int64],
    positions_T: NDArray[np.int64],
    slots_T: NDArray[np.int64],
) -> None:
    """Writes the chunks' tokens one behind the other, from token `first` of the step on."""
    for chunk in chunks:
        tokens = slice(first, first + chunk.num_tokens)
        input_ids_T[tokens] = chunk.state.tokens(chunk.start, chunk.end)
        positions_T[tokens] = np.arange(chunk.start, chunk.end)
        slots_T[tokens] = _slots(seats, chunk)
        first = tokens.stop


def prepare_decodes(tensors: StepTensors, batch: DeviceBatch, block_size: int) -> None:
    """Fills the decodes' part of a step's inputs from their seats."""
    num_decodes = len(tensors.seats_D)
    prepare_decode(
        tensors.seats_D,
        batch.num_tokens_S,
        batch.last_token_S,
        batch.block_tables_SM,
        block_size=block_size,
        input_ids_R=tensors.input_ids_T[:num_decodes],
        positions_R=tensors.positions_T[:num_decodes],
        slots_R=tensors.slots_T[:num_decodes],
        seq_lens_R=tensors.seq_lens_D,
    )


def _slots(seats: SeatTable, chunk: ChunkWork) -> NDArray[np.int64]:
    """slot = block of the position * block_size + offset in the block."""
    block_size = seats.block_size
    blocks = seats.block_table_SB[chunk.state.seat, : -(-chunk.end // block_size)]
    first_block = chunk.start // block_size
    slots: NDArray[np.int64] = (
        blocks[first_block:, None] * block_size + np.arange(block_size)
    ).ravel()
    begin = chunk.start - first_block * block_size
    return slots[begin : begin + chunk.num_tokens]
