"""Block hashes: what makes two KV blocks interchangeable.

A block's hash covers its tokens, every token before it and the cache salt, keyed by a secret of
this boot that is never written down: equal content is visible within a boot (and in its log),
guessing prompts from a log is not possible. The frontend hashes prompts, the core's shell hashes
generated tokens; the pure scheduler only compares.
"""

from hashlib import blake2b

from cearx.core.identifiers import BlockHash

DIGEST_SIZE = 12
"""96 bits under a key that nobody outside knows: only chance can make two blocks collide. With a
million blocks in the pool that takes some 10^22 look-ups; HMAC-96 of IPsec trusts the same size."""
SECRET_SIZE = 32
TOKEN_BYTES = 4


def root_hash(secret: bytes, cache_salt: str | None) -> BlockHash:
    """The parent of a request's first block; differs for every salt and for no salt."""
    salt = b"\x00" if cache_salt is None else b"\x01" + cache_salt.encode()
    return BlockHash(blake2b(salt, digest_size=DIGEST_SIZE, key=secret, person=b"root").digest())


def block_hash(secret: bytes, parent: BlockHash, packed_tokens: bytes) -> BlockHash:
    """The hash of one full block; `packed_tokens` as by `messages.pack_tokens`."""
    digest = blake2b(parent + packed_tokens, digest_size=DIGEST_SIZE, key=secret, person=b"block")
    return BlockHash(digest.digest())


def prompt_hashes(
    secret: bytes, root: BlockHash, packed_tokens: bytes, block_size: int
) -> tuple[BlockHash, ...]:
    """The hashes of all full blocks of a packed prompt, in order."""
    stride = block_size * TOKEN_BYTES
    hashes: list[BlockHash] = []
    parent = root
    for offset in range(0, len(packed_tokens) - stride + 1, stride):
        parent = block_hash(secret, parent, packed_tokens[offset : offset + stride])
        hashes.append(parent)
    return tuple(hashes)
