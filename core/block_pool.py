"""The pool of KV blocks: who holds which, which are cached, which go next.

Pure bookkeeping over integers, driven by the scheduler only. A block is in exactly one of three
places: held (reference count > 0), cached (nobody holds it, its content can be found by hash) or
blank. The cached ones are kept in order of release and reused from the oldest.

      blank ──take──▶ held ──release──▶ cached (published) ──take──▶ held, hash forgotten
        ▲               └───release──▶ blank  (not published)
        └ evicted content is overwritten by its new holder
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from cearx.core.identifiers import BlockHash, BlockId
from cearx.core.prefix_index import PrefixIndex


class BlockPoolState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Everything that decides future answers, in a canonical order."""

    ref_counts: tuple[int, ...]
    hashes: tuple[BlockHash | None, ...]
    blank: tuple[BlockId, ...]
    """In reverse order of use: the last one is taken next."""
    cached: tuple[BlockId, ...]
    """Oldest first."""


class BlockPool:
    """`num_blocks` interchangeable blocks with reference counts and a `PrefixIndex`."""

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self.index = PrefixIndex([None] * num_blocks)
        """What can be found; holders stand here."""
        self._blank = [BlockId(block) for block in range(num_blocks - 1, -1, -1)]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `take` could give now: blank and cached ones."""
        return len(self._blank) + len(self._cached)

    def num_cached(self, block_ids: Iterable[BlockId]) -> int:
        """How many of these are held by nobody, so that sharing them uses up free blocks."""
        return sum(self._ref_counts[block] == 0 for block in block_ids)

    def num_holders(self, block: BlockId) -> int:
        return self._ref_counts[block]

    def num_freed_by(self, tables: Iterable[Iterable[BlockId]]) -> int:
        """How many blocks become free when all these holders let go."""
        counts = Counter(block for table in tables for block in table)
        return sum(self._ref_counts[block] == count for block, count in counts.items())

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """One more holder for blocks that the index found."""
        counts, cached = self._ref_counts, self._cached
        for block in block_ids:
            if counts[block] == 0:
                del cached[block]
            counts[block] += 1

    def take(self, num_blocks: int) -> list[BlockId]:
        """Blocks for new content: blank ones first, then the oldest cached ones.

        The caller has checked `num_free`; asking for more is a broken invariant.
        """
        assert num_blocks <= self.num_free, f"take {num_blocks} of {self.num_free} free blocks"
        num_blank = min(num_blocks, len(self._blank))
        evicted = [self._cached.popitem(last=False)[0] for _ in range(num_blocks - num_blank)]
        self.index.drop(evicted)
        taken = [self._blank.pop() for _ in range(num_blank)] + evicted
        for block in taken:
            self._ref_counts[block] = 1
        return taken

    def publish(self, block: BlockId, block_hash: BlockHash) -> None:
        """Makes a held block findable; a second block of equal content stays private."""
        assert self._ref_counts[block] > 0, f"publish of block {block}, which nobody holds"
        self.index.add(block, block_hash)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """One holder less, from the chain's tail, so that a prefix outlives what follows it."""
        counts, hashes = self._ref_counts, self.index.hashes
        for block in reversed(block_ids):
            assert counts[block] > 0, f"double free of block {block}"
            counts[block] -= 1
            if counts[block] == 0:
                if hashes[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def forget_contents(self) -> int:
        """Nothing computed up to now is found again; who holds blocks keeps them.

        Answers how many blocks nobody held and only their contents kept.
        """
        num_freed = len(self._cached)
        self._blank.extend(reversed(self._cached))
        self._cached.clear()
        self.index.clear()
        return num_freed

    def snapshot(self) -> BlockPoolState:
        return BlockPoolState(
            ref_counts=tuple(self._ref_counts),
            hashes=self.index.snapshot(),
            blank=tuple(self._blank),
            cached=tuple(self._cached),
        )

    @classmethod
    def restore(cls, state: BlockPoolState) -> "BlockPool":
        pool = cls(0)
        pool._ref_counts = list(state.ref_counts)
        pool.index = PrefixIndex(state.hashes)
        pool._blank = list(state.blank)
        pool._cached = OrderedDict.fromkeys(state.cached)
        return pool
