"""Block hashes tell apart whatever makes KV differ, and nothing else."""

from cearx.core.block_hash import DIGEST_SIZE, block_hash, prompt_hashes, root_hash
from cearx.core.messages import pack_tokens

SECRET = bytes(range(32))


def test_only_full_blocks_are_hashed() -> None:
    """The tail of a prompt has no hash until it is a whole block."""
    root = root_hash(SECRET, None)
    for num_tokens in range(0, 40):
        hashes = prompt_hashes(SECRET, root, pack_tokens(list(range(num_tokens))), 16)
        assert len(hashes) == num_tokens // 16
        assert all(len(h) == DIGEST_SIZE for h in hashes)


def test_a_prefix_has_the_same_hashes() -> None:
    """Equal beginnings share hashes up to the first block that differs, and none after it."""
    root = root_hash(SECRET, None)
    tokens = list(range(64))
    changed = tokens.copy()
    changed[20] += 1
    a = prompt_hashes(SECRET, root, pack_tokens(tokens), 16)
    b = prompt_hashes(SECRET, root, pack_tokens(changed), 16)
    assert a[0] == b[0]
    assert not set(a[1:]) & set(b[1:])
    assert prompt_hashes(SECRET, root, pack_tokens(tokens[:50]), 16) == a[:3]


def test_salt_and_secret_isolate() -> None:
    """Another salt, no salt and another boot never share a block."""
    tokens = pack_tokens(list(range(16)))
    roots = [root_hash(SECRET, salt) for salt in (None, "", "a", "b", "\x00")]
    roots.append(root_hash(b"x" * 32, None))
    hashes = [block_hash(SECRET, root, tokens) for root in roots]
    assert len(set(hashes)) == len(hashes)


def test_known_value() -> None:
    """The hash is a fixed function: a change of it must be a decision."""
    assert block_hash(SECRET, root_hash(SECRET, "s"), pack_tokens([1, 2])).hex() == (
        "400636215cde0164cc2426c2"
    )
