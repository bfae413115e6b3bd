"""Which block holds which content: the prefix cache's index.

Owns the hash of each block's content and the block of each hash, one of each at most. Knows nothing
of holders; changed by `block_pool.py` only.
"""

from collections.abc import Iterable, Sequence

from cearx.core.identifiers import BlockHash, BlockId


class PrefixIndex:
    """Of `num_blocks` blocks."""

    def __init__(self, hashes: Sequence[BlockHash | None]) -> None:
        """The hash of each block's content, None where it has none."""
        self.hashes = list(hashes)
        """By block, None where it is found under none; changed here only."""
        self._by_hash = {h: BlockId(block) for block, h in enumerate(hashes) if h is not None}

    def find(self, hashes: Sequence[BlockHash], limit: int) -> list[BlockId]:
        """The blocks of the longest known chain that starts `hashes`, at most `limit` of them."""
        found: list[BlockId] = []
        block_of = self._by_hash.get
        for block_hash in hashes[:limit]:
            block = block_of(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, block: BlockId, block_hash: BlockHash) -> None:
        """The block is found from now on; a second block of equal content is not."""
        if block_hash not in self._by_hash and self.hashes[block] is None:
            self._by_hash[block_hash] = block
            self.hashes[block] = block_hash

    def drop(self, blocks: Iterable[BlockId]) -> None:
        """Their contents are overwritten."""
        for block in blocks:
            evicted = self.hashes[block]
            assert evicted is not None, f"cached block {block} has no hash"
            del self._by_hash[evicted]
            self.hashes[block] = None

    def clear(self) -> None:
        self._by_hash.clear()
        self.hashes = [None] * len(self.hashes)

    def snapshot(self) -> tuple[BlockHash | None, ...]:
        return tuple(self.hashes)
