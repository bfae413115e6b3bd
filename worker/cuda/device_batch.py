"""The running requests on the device: a row of every array for each seat, kept between steps.

Owns one block of memory that holds block tables, lengths, last tokens, sampling parameters and the
decodes' seats, so that whatever a step changes is one list of (word, value) pairs and one scatter.
Never knows which request has a seat. Called by the runner.

S seats, M blocks of the longest request, R rows of the largest batch.

    memory  | seed_S (2 words each) | block_tables_SM | num_tokens_S | ... | decode_seats_R |
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cearx.kernels.sampling_state import SamplingTable
from cearx.worker.cuda.staging import ALIGNMENT, InputStaging
from cearx.worker.request_states import RequestState

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1


class DeviceBatch:
    """Seats 0 to num_seats - 1, and behind them the spare one that padded rows have."""

    def __init__(self, num_seats: int, max_blocks: int, device: torch.device) -> None:
        self.spare_seat = num_seats
        rows = num_seats + 1
        sizes = {
            "seed": 2 * rows,
            "block_tables": rows * max_blocks,
            "num_tokens": rows,
            "last_token": rows,
            "temperature": rows,
            "top_k": rows,
            "top_p": rows,
            "min_p": rows,
            "num_outputs": rows,
            "decode_seats": num_seats,
        }
        self._starts: dict[str, int] = {}
        total = 0
        for name, size in sizes.items():
            self._starts[name] = total
            total += -(-size // ALIGNMENT) * ALIGNMENT
        self._words = torch.zeros(total, dtype=torch.int32, device=device)
        parts = {n: self._words[start : start + sizes[n]] for n, start in self._starts.items()}
        self._max_blocks = max_blocks
        self.block_tables_SM = parts["block_tables"].view(rows, max_blocks)
        self.num_tokens_S = parts["num_tokens"]
        self.last_token_S = parts["last_token"]
        self.decode_seats_R = parts["decode_seats"]
        self.sampling = SamplingTable(
            temperature_S=parts["temperature"].view(torch.float32),
            top_k_S=parts["top_k"],
            top_p_S=parts["top_p"].view(torch.float32),
            min_p_S=parts["min_p"].view(torch.float32),
            seed_S=parts["seed"].view(torch.int64),
            num_outputs_S=parts["num_outputs"],
            last_token_S=self.last_token_S,
            num_tokens_S=self.num_tokens_S,
        )
        self.num_tokens_S[num_seats] = 1
        self.sampling.top_p_S.fill_(1.0)  # padded rows pass through no filter
        self.decode_seats_R.fill_(num_seats)
        self._indices: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.int32]] = []

    @property
    def has_changes(self) -> bool:
        """Whether something waits to be packed."""
        return bool(self._indices)

    def seat(self, seat: int, state: RequestState) -> None:
        """All that a newcomer's row holds, but its blocks."""
        values = {
            "num_tokens": state.num_tokens,
            "last_token": int(state.tokens(state.num_tokens - 1, state.num_tokens)[0]),
            "num_outputs": state.num_outputs,
            "top_k": 0,
        }
        floats = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0}
        seed = 0
        if state.rule is not None:
            params = state.rule.params
            values["top_k"] = min(params.top_k, INT32_MAX)
            floats = {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "min_p": params.min_p,
            }
            seed = params.seed
        starts = self._starts
        indices = [starts[name] + seat for name in (*values, *floats)]
        seed_start = starts["seed"] + 2 * seat
        self._indices.append(np.array([*indices, seed_start, seed_start + 1], np.int64))
        self._values.append(np.fromiter(values.values(), np.int32))
        self._values.append(np.fromiter(floats.values(), np.float32).view(np.int32))
        self._values.append(np.array([seed % 2**64], np.uint64).view(np.int32))

    def set_blocks(self, seat: int, first: int, block_ids: NDArray[np.int64]) -> None:
        """Entries of a block table from the `first` on."""
        start = self._starts["block_tables"] + seat * self._max_blocks + first
        self._indices.append(np.arange(start, start + len(block_ids)))
        self._values.append(block_ids.astype(np.int32))

    def set_token(self, seat: int, state: RequestState) -> None:
        """The token that the host sampled, which `state` knows already."""
        starts = self._starts
        names = ("last_token", "num_tokens", "num_outputs")
        last_token = int(state.tokens(state.num_tokens - 1, state.num_tokens)[0])
        self._indices.append(np.array([starts[name] + seat for name in names], np.int64))
        self._values.append(np.array([last_token, state.num_tokens, state.num_outputs], np.int32))

    def set_decode_seats(self, seats_D: NDArray[np.int32]) -> None:
        """The rows of the decodes; all further ones are the spare seat's."""
        start, size = self._starts["decode_seats"], len(self.decode_seats_R)
        seats_R = np.full(size, self.spare_seat, np.int32)
        seats_R[: len(seats_D)] = seats_D
        self._indices.append(np.arange(start, start + size))
        self._values.append(seats_R)

    def pack(self, staging: InputStaging) -> tuple[Tensor, Tensor] | None:
        """Packs the changes; the result goes to `apply` after the copy."""
        if not self._indices:
            return None
        packed = (
            staging.put(np.concatenate(self._indices)),
            staging.put(np.concatenate(self._values)),
        )
        self._indices.clear()
        self._values.clear()
        return packed

    def apply(self, changes: tuple[Tensor, Tensor] | None) -> None:
        """Writes what `pack` packed."""
        if changes is not None:
            self._words.index_copy_(0, *changes)

    def set_spare_block(self, block_id: int) -> None:
        """The block that padded rows write to, which no request is ever granted."""
        self.block_tables_SM[self.spare_seat] = block_id
