"""Who holds which block and what it can be found under, kept from records alone.

Owns reference counts, the hashes of cached content and the blocks that wait for a step in flight;
knows no queue and no plan. Tolerant of blocks that do not exist. Kept by `ledger.py`, read by the
rules and by `state_at.py`.
"""

from collections.abc import Sequence

import msgspec

from cearx.core.books import Books
from cearx.core.config import SchedulerConfig
from cearx.core.identifiers import BlockHash, BlockId, StepId
from cearx.replay.ledger_request import LedgerRequest


class _Fence(msgspec.Struct, frozen=True):
    step_id: StepId
    """The last step in flight that touches the blocks."""
    block_ids: list[BlockId]


class BlockLedger:
    """Changed by the ledger only."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.num_held = 0
        """Blocks that somebody holds, fenced ones included."""
        self.num_cached = 0
        """Blocks that nobody holds and that can be found by their hash."""
        self.num_forgotten = 0
        """Cached blocks that the last reset gave back."""
        self._fences: list[_Fence] = []
        self._ref_counts = [0] * config.num_blocks
        self._hashes: dict[BlockId, BlockHash] = {}
        self._by_hash: dict[BlockHash, BlockId] = {}

    @classmethod
    def of(cls, books: Books) -> "BlockLedger":
        """As a snapshot says."""
        ledger, pool = cls(books.config), books.pool.snapshot()
        ledger._fences = [_Fence(f.last_step, list(f.block_ids)) for f in books.fences.all()]
        ledger._ref_counts = list(pool.ref_counts)
        ledger._hashes = {BlockId(b): h for b, h in enumerate(pool.hashes) if h is not None}
        ledger._by_hash = {h: b for b, h in ledger._hashes.items()}
        ledger.num_held = sum(count > 0 for count in pool.ref_counts)
        ledger.num_cached = len(pool.cached)
        return ledger

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.config.num_blocks - self.num_held

    def num_holders(self, block_id: BlockId) -> int:
        return self._ref_counts[block_id]

    def content(self, block_id: BlockId) -> BlockHash | None:
        """The hash under which a block can be found now."""
        return self._hashes.get(block_id)

    def fenced(self) -> list[tuple[StepId, list[BlockId]]]:
        """Blocks of requests that are gone, with the step in flight that may touch them."""
        return [(fence.step_id, fence.block_ids) for fence in self._fences]

    def forget_contents(self) -> None:
        self._hashes.clear()
        self._by_hash.clear()
        self.num_forgotten, self.num_cached = self.num_cached, 0

    def hold(self, request: LedgerRequest, block_ids: Sequence[BlockId], num_hits: int) -> None:
        """One more holder each; all but the `num_hits` first get new content."""
        request.block_ids.extend(block_ids)
        for index, block in enumerate(block_ids):
            if not 0 <= block < self.config.num_blocks:
                continue
            if self._ref_counts[block] == 0:
                self.num_held += 1
                self.num_cached -= block in self._hashes
                if index >= num_hits and block in self._hashes:
                    del self._by_hash[self._hashes.pop(block)]
            self._ref_counts[block] += 1

    def publish(self, request: LedgerRequest) -> None:
        """Full blocks of known tokens whose KV is there can be found from now on."""
        if not (request.publishes and request.is_running):
            return
        full = min(request.num_written // self.config.block_size, len(request.block_hashes))
        for index in range(request.num_published, min(full, len(request.block_ids))):
            block, block_hash = request.block_ids[index], request.block_hashes[index]
            if block_hash not in self._by_hash and block not in self._hashes:
                self._by_hash[block_hash] = block
                self._hashes[block] = block_hash
        request.num_published = max(request.num_published, full)

    def fence(self, last_step: StepId, block_ids: list[BlockId]) -> None:
        """They stay held until that step, which may touch them, is finished."""
        self._fences.append(_Fence(last_step, block_ids))

    def release_behind(self, finished: StepId) -> None:
        """Frees what no step behind the finished one touches."""
        freed = [fence for fence in self._fences if fence.step_id <= finished]
        self._fences = [fence for fence in self._fences if fence.step_id > finished]
        for fence in freed:
            self.release(fence.block_ids)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        for block in block_ids:
            if 0 <= block < self.config.num_blocks and self._ref_counts[block]:
                self._ref_counts[block] -= 1
                if self._ref_counts[block] == 0:
                    self.num_held -= 1
                    self.num_cached += block in self._hashes
