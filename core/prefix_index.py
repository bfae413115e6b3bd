"""Which block holds which content: the prefix cache's index.

Owns the hash of each block's content and the block of each hash, one of each at most. Knows nothing
of holders; changed by `block_pool.py` only.
"""

from collections.abc import Sequence

from cearx.core.identifiers import BlockHash, BlockId


class PrefixIndex:
    """Of `num_blocks` blocks."""

    def __init__(self, hashes: Sequence[BlockHash | None]) -> None:
        """The hash of each block's content, None where it has none."""
        self._hashes = list(hashes)
        self._by_hash = {h: BlockId(block) for block, h in enumerate(hashes) if h is not None}

    def find(self, hashes: Sequence[BlockHash], limit: int) -> list[BlockId]:
        """The blocks of the longest known chain that starts `hashes`, at most `limit` of them."""
        found: list[BlockId] = []
        for block_hash in hashes[:limit]:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def content(self, block: BlockId) -> BlockHash | None:
        """Under which hash the block is found."""
        return self._hashes[block]

    def add(self, block: BlockId, block_hash: BlockHash) -> None:
        """The block is found from now on; a second block of equal content is not."""
        if block_hash not in self._by_hash and self._hashes[block] is None:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def drop(self, block: BlockId) -> None:
        """Its content is overwritten."""
        evicted = self._hashes[block]
        assert evicted is not None, f"cached block {block} has no hash"
        del self._by_hash[evicted]
        self._hashes[block] = None

    def clear(self) -> None:
        self._by_hash.clear()
        self._hashes = [None] * len(self._hashes)

    def snapshot(self) -> tuple[BlockHash | None, ...]:
        return tuple(self._hashes)
