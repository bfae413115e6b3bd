"""Steps with few tokens of prompts as graphs: padded to a few sizes, all inputs in fixed places.

Launching every kernel of a step costs the host milliseconds, whatever the step's size. Here each
row, decodes too, is a chunk, so that a graph depends on nothing but the padded number of tokens.
Padded tokens write to the spare block, padded chunks are empty and padded rows sample for the
spare seat. Owns the layout of the inputs; called by the runner and, to capture, by `start.py`.
Legend: T tokens, C chunks, S seats, D decodes.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cearx.worker.cuda.decode_group import DecodeGroup, decode_group
from cearx.worker.cuda.decoder import StepTensors
from cearx.worker.cuda.device_model import DeviceModel
from cearx.worker.cuda.graph_runner import MODES, Mode, StepGraphs, padded_size
from cearx.worker.cuda.staging import InputStaging
from cearx.worker.cuda.step_builder import ChunkWork, pack_chunks, prepare_decodes
from cearx.worker.seats import SeatTable

SIZES = (16, 32, 64, 128, 256, 512)
MAX_ROWS = 64
"""Decodes and chunks of a padded step."""
MAX_CONTEXT = 2048
"""Tokens of a decode: its one program walks all of them, where others would share them."""


def padded_step_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """The sizes that get a graph, ascending."""
    return tuple(size for size in SIZES if size <= max_num_batched_tokens)


class PaddedSteps:
    """Small steps with chunks; captured or, in tests, launched kernel by kernel."""

    def __init__(
        self, sizes: tuple[int, ...], model: DeviceModel, staging: InputStaging, seats: SeatTable
    ) -> None:
        self.graphs: StepGraphs | None = None
        """None: every kernel is launched by itself."""
        self._sizes = sizes
        self._model = model
        self._staging = staging
        self._seats = seats
        self._inputs: dict[int, tuple[StepTensors, torch.Tensor]] = {}
        for size in sizes:
            self.send(size, decode_group((), ()), ())

    def size_of(
        self, decodes: DecodeGroup, chunks: Sequence[ChunkWork], num_tokens_S: NDArray[np.int64]
    ) -> int | None:
        """The padded size of a step; None if it must be launched otherwise."""
        num_decodes = len(decodes.states)
        num_tokens = num_decodes + sum(chunk.num_tokens for chunk in chunks)
        if not self._sizes or num_tokens > self._sizes[-1]:
            return None
        size = padded_size(self._sizes, num_tokens)
        if num_decodes + len(chunks) > self._num_rows(size):
            return None
        if num_decodes and int(num_tokens_S[decodes.seats_D].max()) > MAX_CONTEXT:
            return None
        return size

    def send(self, size: int, decodes: DecodeGroup, chunks: Sequence[ChunkWork]) -> None:
        """Brings a step's inputs and the batch's changes to the device; `replay` comes next."""
        batch, staging = self._model.batch, self._staging
        num_decodes, num_rows = len(decodes.states), self._num_rows(size)
        words_T = np.zeros((3, size), np.int64)
        words_T[2] = self._model.spare_slot
        pack_chunks(chunks, self._seats, num_decodes, *words_T)
        count = num_decodes + len(chunks)
        rows = np.zeros((3, num_rows), np.int32)  # seats, lengths with the chunk, sampled seats
        rows[0] = rows[2] = batch.spare_seat
        rows[0, :num_decodes] = decodes.seats_D
        rows[0, num_decodes:count] = np.array([chunk.state.seat for chunk in chunks], np.int32)
        rows[1, num_decodes:count] = [chunk.end for chunk in chunks]
        lengths = np.zeros(num_rows, np.int32)
        lengths[:num_decodes] = 1
        lengths[num_decodes:count] = [chunk.num_tokens for chunk in chunks]
        cu_seqlens = np.zeros(num_rows + 1, np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        samples = np.zeros(num_rows, bool)
        samples[:num_decodes] = True
        samples[num_decodes:count] = [chunk.samples for chunk in chunks]
        num_sampled = int(samples.sum())
        indices = np.zeros(num_rows, np.int64)
        indices[:num_sampled] = cu_seqlens[1:][samples] - 1
        rows[2, :num_sampled] = rows[0][samples]
        staging.begin()
        # Put first and of a fixed length, these lie where the size's graphs look for them.
        views = [staging.put(a) for a in (*words_T, rows[0], cu_seqlens, rows[1], indices, rows[2])]
        if size not in self._inputs:
            self._inputs[size] = (self._tensors(size, views), views[7])
        changes = batch.pack(staging)
        staging.send()
        batch.apply(changes)
        if num_decodes:
            prepare_decodes(
                StepTensors(
                    input_ids_T=views[0],
                    positions_T=views[1],
                    slots_T=views[2],
                    block_tables_SM=batch.block_tables_SM,
                    seats_D=views[3][:num_decodes],
                    seq_lens_D=views[5][:num_decodes],
                ),
                batch,
                self._model.block_size,
            )

    def run(self, size: int, mode: Mode) -> None:
        """The whole step, from the inputs of the last `send`; reads only the device's memory."""
        tensors, sampled_seats_C = self._inputs[size]
        logits_CV = self._model.forward(tensors)
        if mode != "logits":
            self._model.sample(logits_CV, sampled_seats_C, mode)

    def replay(self, size: int, mode: Mode) -> None:
        """Enqueues what `run` does. Sampling rows stand first, decodes before chunks."""
        if self.graphs is None:
            self.run(size, mode)
        else:
            self.graphs.replay(size, mode)

    def capture(self, stream: torch.cuda.Stream, on_progress: Callable[[int, int], None]) -> None:
        """Captures and replays all sizes; raises what the step or CUDA raises."""
        graphs = StepGraphs(self._sizes, stream)
        total = len(self._sizes) * len(MODES)
        for index, size in enumerate(reversed(self._sizes)):
            self.send(size, decode_group((), ()), ())
            for number, mode in enumerate(MODES, 1):
                graphs.capture_one(self.run, size, mode)
                on_progress(index * len(MODES) + number, total)
        self.graphs = graphs

    def _num_rows(self, size: int) -> int:
        return min(size, MAX_ROWS, self._model.batch.spare_seat)

    def _tensors(self, size: int, views: list[torch.Tensor]) -> StepTensors:
        return StepTensors(
            input_ids_T=views[0],
            positions_T=views[1],
            slots_T=views[2],
            block_tables_SM=self._model.batch.block_tables_SM,
            seats_D=views[3][:0],
            seq_lens_D=views[5][:0],
            seats_C=views[3],
            cu_seqlens_q=views[4],
            seq_lens_C=views[5],
            max_chunk_len=size,
            logits_indices_R=views[6],
        )
