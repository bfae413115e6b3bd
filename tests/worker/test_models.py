"""Models against transformers in float32: the same logits, however sequences are cut into steps."""

import random

import pytest
import torch
from paged_steps import PagedSequence, PagedSteps
from tiny_models import FAMILIES, reference_logits, tiny_model
from torch import Tensor
from transformers import PreTrainedModel
from worker_models import kv_pool, worker_model

from cearx.worker import attention

TOLERANCE = 1e-4
ARCHITECTURES = sorted(FAMILIES)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tokens(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{seed} {length}")
    return [generator.randrange(3, 300) for _ in range(length)]


def largest_error(ours: Tensor, theirs: Tensor) -> float:
    """NaN counts as infinite."""
    return float((ours - theirs).abs().nan_to_num(torch.inf).max())


def run_cut(
    reference: PreTrainedModel, token_ids: list[int], counts: list[int], block_size: int
) -> Tensor:
    """Logits of one sequence that is computed in steps of `counts` tokens."""
    steps = PagedSteps(
        worker_model(reference), kv_pool(reference, len(token_ids), block_size), seed=block_size
    )
    sequence = PagedSequence(token_ids)
    return torch.cat([steps.step([(sequence, count)])[0] for count in counts])


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_whole_prompt(family: str, tied: bool) -> None:
    """A prompt in one step gives the reference's logits at every position."""
    reference = tiny_model(family, tied=tied)
    ids = tokens(75)
    assert largest_error(run_cut(reference, ids, [75], 16), reference_logits(reference, ids)) < (
        TOLERANCE
    )


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(3, 3, 16), (6, 2, 64), (7, 1, 16)]
)
def test_chunks_then_decodes(
    family: str, block_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Chunks of 16 and then single tokens give the reference's logits at every position."""
    reference = tiny_model(
        family, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    ids = tokens(61)
    ours = run_cut(reference, ids, [16, 16, 16, 2] + [1] * 11, block_size)
    assert largest_error(ours, reference_logits(reference, ids)) < TOLERANCE


def test_long_chunk_after_a_prefix() -> None:
    """A chunk longer than a mask and than a tile, after a prefix, equals the reference."""
    reference = tiny_model("qwen3", max_positions=2048)
    ids = tokens(900)
    assert attention.MASKED_QUERIES < 700
    ours = run_cut(reference, ids, [130, 769, 1], 16)
    assert largest_error(ours, reference_logits(reference, ids)) < TOLERANCE


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("group_bytes", [1, 4096, attention.GROUP_BYTES])
def test_mixed_steps(
    family: str, block_size: int, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of many lengths, decodes and chunks in one step, give the reference's logits."""
    monkeypatch.setattr(attention, "GROUP_BYTES", group_bytes)
    reference = tiny_model(family)
    generator = random.Random(f"{family} {block_size} {group_bytes}")
    lengths = [1, 2, 5, 16, 17, 33, 64, 90, 150]
    sequences = [PagedSequence(tokens(length, seed=7)) for length in lengths]
    expected = [reference_logits(reference, sequence.token_ids) for sequence in sequences]
    room = sum(lengths) + block_size * len(lengths)
    steps = PagedSteps(worker_model(reference), kv_pool(reference, room, block_size))
    while left := [sequence for sequence in sequences if sequence.num_left]:
        chosen = generator.sample(left, generator.randint(1, len(left)))
        rows = [
            (s, 1 if generator.random() < 0.4 else generator.randint(1, min(40, s.num_left)))
            for s in chosen
        ]
        rows.sort(key=lambda row: row[1] != 1)
        before = [sequence.num_computed for sequence, _ in rows]
        for (sequence, count), start, ours in zip(rows, before, steps.step(rows), strict=True):
            theirs = expected[sequences.index(sequence)][start : start + count]
            assert largest_error(ours, theirs) < TOLERANCE


def test_prefix_computed_by_another_request() -> None:
    """Blocks that one request filled serve another that begins with the same tokens."""
    reference = tiny_model("llama")
    shared = tokens(48)
    steps = PagedSteps(worker_model(reference), kv_pool(reference, 256, 16))
    first = PagedSequence([*shared, *tokens(9, seed=1)])
    steps.step([(first, 57)])
    second = PagedSequence([*shared, *tokens(30, seed=2)], num_computed=48, blocks=first.blocks[:3])
    third = PagedSequence([*shared, *tokens(1, seed=3)], num_computed=48, blocks=first.blocks[:3])
    third_logits, second_logits = steps.step([(third, 1), (second, 30)])
    expected = reference_logits(reference, second.token_ids)[48:]
    assert largest_error(second_logits, expected) < TOLERANCE
    assert largest_error(third_logits, reference_logits(reference, third.token_ids)[48:]) < (
        TOLERANCE
    )


def test_recompute_in_other_blocks() -> None:
    """A request that lost its blocks gives the same logits when it is computed again."""
    reference = tiny_model("qwen2")
    steps = PagedSteps(worker_model(reference), kv_pool(reference, 160, 16))
    sequence, other = PagedSequence(tokens(70)), PagedSequence(tokens(40, seed=1))
    steps.step([(sequence, 50), (other, 39)])
    steps.release(sequence)
    other_logits, logits = steps.step([(other, 1), (sequence, 70)])
    assert largest_error(logits, reference_logits(reference, sequence.token_ids)) < TOLERANCE
    assert largest_error(other_logits, reference_logits(reference, other.token_ids)[39:]) < (
        TOLERANCE
    )


def test_consecutive_blocks() -> None:
    """Blocks in a row, which are read without gathering, give the reference's logits."""
    reference = tiny_model("llama")
    steps = PagedSteps(worker_model(reference), kv_pool(reference, 80, 16), scattered=False)
    sequence = PagedSequence(tokens(77))
    ours = torch.cat([steps.step([(sequence, n)])[0] for n in [20, 30, 25, 1, 1]])
    assert largest_error(ours, reference_logits(reference, sequence.token_ids)) < TOLERANCE


def test_only_the_wanted_rows_get_logits() -> None:
    """Logits come for the tokens that are named, in that order, and as float32."""
    reference = tiny_model("llama", tied=True)
    model = worker_model(reference, torch.bfloat16)
    kv_cache = kv_pool(reference, 32, 16, torch.bfloat16)
    metadata = attention.AttentionMetadata(
        num_decodes=0,
        cu_seqlens_q=torch.tensor([0, 5]),
        seq_lens=torch.tensor([5]),
        block_tables=torch.tensor([[0]]),
        slot_mapping=torch.arange(5),
    )
    inputs = torch.tensor(tokens(5)), torch.arange(5), kv_cache, metadata
    with torch.inference_mode():
        every = model.forward(*inputs, torch.arange(5))
        some = model.forward(*inputs, torch.tensor([4, 1]))
    assert some.dtype == torch.float32
    torch.testing.assert_close(some, every[[4, 1]], atol=0.05, rtol=0.05)


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(family: str, dtype: torch.dtype) -> None:
    """In 16-bit types the logits stay as near to float32 as the reference's own 16-bit ones."""
    reference = tiny_model(family)
    exact = reference_logits(reference, tokens(40))
    low = tiny_model.__wrapped__(family).to(dtype)
    their_error = largest_error(reference_logits(low, tokens(40)).float(), exact)
    steps = PagedSteps(worker_model(reference, dtype), kv_pool(reference, 40, 16, dtype))
    ours = steps.step([(PagedSequence(tokens(40)), 40)])[0]
    assert largest_error(ours, exact) < 1.5 * their_error
