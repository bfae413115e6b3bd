"""The seats of running requests: arrays that batches are gathered from, a row a request.

Owns block tables, lengths and last tokens at their maximal size, so that a batch of decodes is a
few gathers instead of a loop over requests. Never knows which request has a seat. Called by
`request_states` and `batch_inputs`. Legend: S seats, B blocks of the longest request.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cearx.core.identifiers import BlockId


class SeatTable:
    """`num_seats` rows; a free one has no blocks."""

    def __init__(self, num_seats: int, max_model_len: int, block_size: int) -> None:
        self.num_seats = num_seats
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.block_table_SB: NDArray[np.int64] = np.zeros((num_seats, self.max_blocks), np.int64)
        self.num_blocks_S: NDArray[np.int64] = np.zeros(num_seats, np.int64)
        self.num_tokens_S: NDArray[np.int64] = np.zeros(num_seats, np.int64)
        """Known tokens: of the prompt and sampled."""
        self.last_token_S: NDArray[np.int64] = np.zeros(num_seats, np.int64)
        self._free = list(range(num_seats - 1, -1, -1))

    def take(self, num_tokens: int, last_token: int) -> int:
        """A free seat, with an empty block table."""
        assert self._free, f"more than {len(self.num_blocks_S)} requests run"
        seat = self._free.pop()
        self.num_blocks_S[seat] = 0
        self.num_tokens_S[seat] = num_tokens
        self.last_token_S[seat] = last_token
        return seat

    def append_blocks(self, seat: int, block_ids: Sequence[BlockId]) -> None:
        start = int(self.num_blocks_S[seat])
        end = start + len(block_ids)
        assert end <= self.max_blocks, f"{end} blocks for one request, at most {self.max_blocks}"
        self.block_table_SB[seat, start:end] = block_ids
        self.num_blocks_S[seat] = end

    def release(self, seat: int) -> None:
        self.num_blocks_S[seat] = 0
        self._free.append(seat)
