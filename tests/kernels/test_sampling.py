"""Sampling on the device against the worker's sampler, and its edges by made-up seeds."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from sampling_rows import Row, on_cpu, on_device
from token_race import seed_of_hash, token_uniform

from cearx.kernels.sampling import Mode, sample
from cearx.kernels.sampling_noise import row_start, token_noise
from cearx.kernels.sampling_state import SamplingScratch, SamplingTable

VOCAB = 5003
"""Three tiles, the last one partly filled, and more tokens than candidates have room."""


def winning_seed(token: int, num_outputs: int) -> int:
    """The seed with which a token beats every other that is kept."""
    seed = seed_of_hash(2**64 - 1, num_outputs, token)
    return seed - 2**64 if seed >= 2**63 else seed


@triton.jit
def _noise_kernel(p_seed: tl.tensor, p_id: tl.tensor, p_out: tl.tensor, NUM: tl.constexpr):
    for i in range(NUM):
        b_id = tl.load(p_id + i + tl.arange(0, 1))
        start = row_start(tl.load(p_seed + i), b_id * 0 + 3)
        tl.store(p_out + i + tl.arange(0, 1), token_noise(start, b_id))


def test_noise_has_all_its_digits(device: torch.device) -> None:
    """-log(u) to float32's precision, also next to 0 and next to 1."""
    hashes = [0, 1 << 12, 2**64 - 1, 2**64 - 2**13, 2**63, 2**63 - 1, 2**64 - 2**41, 2**40, 2**62]
    hashes += [2**64 - 2**50 - 77, 2**64 - 2**58, 12345 << 30]
    ids = [i * 991 for i in range(len(hashes))]
    seeds = [seed_of_hash(h, 3, i) for h, i in zip(hashes, ids, strict=True)]
    out = torch.empty(len(hashes), device=device)
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds], device=device)
    _noise_kernel[(1,)](signed, torch.tensor(ids, dtype=torch.int32).to(device), out, len(hashes))
    uniforms = np.array([token_uniform(s, 3, i) for s, i in zip(seeds, ids, strict=True)])
    assert np.allclose(out.cpu().numpy(), -np.log(uniforms), rtol=2e-6, atol=0)


def test_greedy_takes_the_first_of_the_largest(device: torch.device) -> None:
    """Across tiles and within one; rows without a finite peak fail and leave their seats alone."""
    logits = torch.randn(7, VOCAB).clamp(max=4)
    logits[0, [77, 4000]] = 9
    logits[1, [4999, 5002]] = 9
    logits[2, 3] = torch.nan
    logits[3, 4500] = torch.inf
    logits[4] = -torch.inf
    logits[5] = -1e30
    logits[6, 5001] = 9
    for mode in ("greedy", "plain", "filtered"):
        tokens, table = on_device(logits, [Row(temperature=0, top_k=3)] * 7, mode, device)
        assert tokens == [77, 4999, -1, -1, -1, 0, 5001], mode
        # Row r has seat 6 - r; the last one is spare.
        assert table.last_token_S.tolist() == [5001, 0, 0, 0, 0, 4999, 77, 0]
        assert table.num_outputs_S.tolist() == [1, 1, 0, 0, 0, 1, 1, 0]
        assert table.num_tokens_S.tolist() == [2, 2, 1, 1, 1, 2, 2, 1]


@pytest.mark.parametrize("mode", ["greedy", "plain", "filtered"])
def test_the_spare_seat_stays_as_it_is(mode: Mode, device: torch.device) -> None:
    """Rows that fill up a batch all name it."""
    table = SamplingTable.allocate(3, device)
    seats = torch.tensor([2, 0, 2, 2], dtype=torch.int32, device=device)
    tokens = torch.full((4,), -5, dtype=torch.int32, device=device)
    logits = torch.randn(4, 300, device=device)
    sample(logits, seats, table, tokens, SamplingScratch.allocate(6, 300, device), mode=mode)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert table.num_tokens_S.tolist() == [2, 1, 1]
    assert table.num_outputs_S.tolist() == [1, 0, 0]


def random_rows(count: int) -> tuple[torch.Tensor, list[Row]]:
    """Peaked and flat logits under every kind of rule."""
    generator = np.random.default_rng(7)
    logits = torch.from_numpy(generator.standard_normal((count, VOCAB)).astype(np.float32))
    logits *= torch.from_numpy(generator.choice([0.5, 2.0, 5.0], (count, 1)).astype(np.float32))
    rows = [
        Row(
            temperature=float(generator.choice([0.0, 0.3, 1.0, 1.0, 1.7])),
            top_k=int(generator.choice([0, 0, 1, 20, 200, 4900, VOCAB + 5])),
            top_p=float(generator.choice([1.0, 1.0, 0.95, 0.5, 1e-4])),
            min_p=float(generator.choice([0.0, 0.0, 0.02, 1.0])),
            seed=int(generator.integers(-(2**63), 2**63)),
            num_outputs=int(generator.integers(0, 5000)),
        )
        for _ in range(count)
    ]
    return logits, rows


@pytest.mark.parametrize("mode", ["plain", "filtered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_seed_same_token_as_on_the_cpu(
    mode: Mode, dtype: torch.dtype, device: torch.device, on_gpu: bool
) -> None:
    """float32 races end as float64 ones do, but for one in a thousand."""
    count = 2000 if on_gpu else 24
    logits, rows = random_rows(count)
    logits = logits.to(dtype)
    tokens, table = on_device(logits, rows, mode, device)
    if mode == "plain":
        rows = [
            Row(temperature=r.temperature, seed=r.seed, num_outputs=r.num_outputs) for r in rows
        ]
    wanted = on_cpu(logits, rows)
    different = sum(a != b for a, b in zip(tokens, wanted, strict=True))
    assert different <= count // 500, f"{different} of {count}"
    assert table.last_token_S.tolist()[:-1] == tokens[::-1]


KEPT = [
    Row(top_k=1),
    Row(top_k=50),
    Row(top_k=3000, temperature=0.5),
    Row(top_p=0.4),
    Row(top_p=0.999),
    Row(top_p=0.9, temperature=0.2),
    Row(min_p=0.3),
    Row(min_p=0.001),
    Row(top_k=40, top_p=0.9),
    Row(top_k=200, min_p=0.05, top_p=0.8),
    Row(min_p=0.02, top_p=0.7, temperature=1.5),
]


@pytest.mark.parametrize("flat", [False, True])
def test_exactly_the_cpus_tokens_are_kept(flat: bool, device: torch.device) -> None:
    """A token that its seed lets win is drawn if, and only if, the filters keep it.

    Asked of the last kept and the first dropped tokens of every rule.
    """
    torch.manual_seed(5)
    logits_V = torch.randn(VOCAB) * (0.2 if flat else 3)
    order = logits_V.argsort(descending=True).tolist()
    rows, asked = [], []
    for rule in KEPT:
        kept = len(_kept_on_cpu(logits_V, rule))
        for rank in {kept - 1, kept} & set(range(VOCAB)):
            asked.append((order[rank], rank < kept))
            rows.append(replace(rule, seed=winning_seed(order[rank], 0)))
    tokens, _ = on_device(logits_V.expand(len(rows), -1).contiguous(), rows, "filtered", device)
    answers = [token == asked_token for token, (asked_token, _) in zip(tokens, asked, strict=True)]
    assert answers == [is_kept for _, is_kept in asked]


def _kept_on_cpu(logits_V: torch.Tensor, row: Row) -> set[int]:
    """By definition, with a sort, in float64."""
    logits = logits_V.double()
    order = logits.argsort(descending=True, stable=True)
    kept = order[: row.top_k] if row.top_k else order
    weights = ((logits[kept] - logits.max()) / float(np.float32(row.temperature))).exp()
    kept, weights = kept[weights >= row.min_p], weights[weights >= row.min_p]
    before = weights.cumsum(0) - weights
    if row.top_p < 1:
        kept = kept[before < float(np.float32(row.top_p)) * weights.sum()]
    return set(kept.tolist())


def test_equal_tokens_at_the_end_of_top_p(device: torch.device) -> None:
    """Of equal tokens the lowest ids are kept, and top_k keeps all that equal its last."""
    logits_V = torch.full((VOCAB,), -50.0)
    equal = [11, 700, 2500, 4000, 5002]
    logits_V[equal] = 2.0
    rules = [Row(top_p=0.5), Row(top_p=0.41), Row(top_p=0.1), Row(top_k=2)]
    kept = [3, 3, 1, 5]
    rows, wanted = [], []
    for rule, num_kept in zip(rules, kept, strict=True):
        for i, token in enumerate(equal):
            rows.append(replace(rule, seed=winning_seed(token, 0)))
            wanted.append(i < num_kept)
    tokens, _ = on_device(logits_V.expand(len(rows), -1).contiguous(), rows, "filtered", device)
    assert [token == equal[i % 5] for i, token in enumerate(tokens)] == wanted


def test_tokens_follow_their_probabilities(device: torch.device, on_gpu: bool) -> None:
    """Chi-square over the five tokens of a small vocabulary."""
    count = 20_000 if on_gpu else 400
    probabilities = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = torch.from_numpy(np.log(probabilities)).float().expand(count, -1).contiguous()
    rows = [Row(seed=3, num_outputs=i) for i in range(count)]
    tokens, _ = on_device(logits, rows, "plain", device)
    expected = probabilities * count
    counted = np.bincount(tokens, minlength=5)
    assert ((counted - expected) ** 2 / expected).sum() < 23.5  # 1 in 10,000, four degrees
