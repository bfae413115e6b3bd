"""Packed products and tensor-parallel layers against torch's own linear."""

import threading

import pytest
import torch
from paged_steps import PagedSequence, PagedSteps
from tiny_models import reference_logits, tiny_model
from torch import Tensor
from torch.nn.functional import linear, silu
from worker_models import kv_pool, worker_model

from cearx.worker.linear import (
    ColumnParallelLinear,
    GatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from cearx.worker.packed_weight import TILE_ROWS, PackedWeight
from cearx.worker.panel_weight import PanelWeight
from cearx.worker.tensor_parallel import SingleRank
from cearx.worker.weights import WeightSlot

FLOAT = torch.float32


class OneOfTwo:
    """A rank of two whose collectives are not called: the test sums and joins."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, shard: Tensor) -> Tensor:
        raise AssertionError("the test joins shards itself")


class ThreadRank:
    """A rank that exchanges tensors with its peers in other threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, box: list[Tensor]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._box = barrier, box

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._box[self.rank] = tensor.clone()
        self._barrier.wait(timeout=60)
        everyone = list(self._box)
        self._barrier.wait(timeout=60)
        return everyone

    def all_reduce(self, partial: Tensor) -> Tensor:
        return torch.stack(self._exchange(partial)).sum(0)

    def all_gather(self, shard: Tensor) -> Tensor:
        return torch.cat(self._exchange(shard), dim=-1)


def fill(slots: dict[str, WeightSlot], **tensors: Tensor) -> None:
    """Fills `gate_weight=` into the slot `gate.weight`; every slot must be given."""
    given = {name.replace("_", "."): tensor for name, tensor in tensors.items()}
    assert given.keys() == slots.keys()
    for name, tensor in given.items():
        assert slots[name].shape == tuple(tensor.shape)
        slots[name].fill(tensor)


def new_weight(
    kind: type[PackedWeight] | type[PanelWeight], out_features: int, in_features: int
) -> PackedWeight | PanelWeight:
    if kind is PanelWeight:
        return PanelWeight(out_features, in_features)
    return PackedWeight(out_features, in_features, FLOAT)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 16, TILE_ROWS, TILE_ROWS + 1])
@pytest.mark.parametrize(
    ("out_features", "parts", "in_features"),
    [
        (576, [576], 33),
        (960, [576, 192, 192], 64),
        (1152, [900, 250, 2], 8),
        (3072, [1536, 1536], 16),
        (301, [300, 1], 5),
        (7, [7], 1),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weight_type", [PackedWeight, PanelWeight])
def test_packed_product(
    num_rows: int,
    out_features: int,
    parts: list[int],
    in_features: int,
    bias: bool,
    weight_type: type[PackedWeight] | type[PanelWeight],
) -> None:
    """Every way to multiply equals torch's linear in float64, whatever the sizes."""
    torch.manual_seed(0)
    weight, x = torch.randn(out_features, in_features), torch.randn(num_rows, in_features)
    packed = new_weight(weight_type, out_features, in_features)
    first_row = 0
    for rows in weight.split(parts):
        packed.store_rows(first_row, rows)
        first_row += rows.shape[0]
    offset = torch.randn(out_features) if bias else None
    if offset is not None:
        packed.store_bias(0, offset)
    expected = linear(
        x.double(), weight.double(), None if offset is None else offset.double()
    ).float()
    torch.testing.assert_close(packed.product(x), expected)
    residual = torch.randn(num_rows, out_features)
    total = residual.clone()
    packed.add_product(x, total)
    torch.testing.assert_close(total, residual + expected)
    ids = torch.randint(out_features, (5,))
    assert torch.equal(packed.columns(ids), weight[ids])


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("weight_type", [PackedWeight, PanelWeight])
def test_large_residual_does_not_round_the_terms(
    num_rows: int, weight_type: type[PackedWeight] | type[PanelWeight]
) -> None:
    """A product that is added to a large residual is as exact as the sum's own rounding."""
    torch.manual_seed(0)
    weight, x = torch.randn(96, 1536), torch.randn(num_rows, 1536)
    packed = new_weight(weight_type, 96, 1536)
    packed.store_rows(0, weight)
    total = torch.full((num_rows, 96), 4096.0)
    packed.add_product(x, total)
    exact = 4096.0 + linear(x.double(), weight.double())
    assert float((total - exact).abs().max()) < 3.5e-4  # half a unit in the last place is 2.4e-4


@pytest.mark.parametrize("num_threads", [1, 2, 8])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("out_features", [1152, 3072, 4096, 9728, 49152])
def test_threads_share_blocks_evenly(
    out_features: int, halves: bool, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of real models are cut into blocks of a fast width, the same for every thread."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    packed = PackedWeight(out_features, 1, FLOAT, halves=halves)
    num_blocks = packed.blocks_BKW.shape[0]
    assert 64 <= packed.width <= 512
    assert num_blocks % num_threads == 0 or num_blocks >= 16 * num_threads
    assert num_blocks % 2 == 0 or not halves


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_column_parallel_shares(num_rows: int, kv_heads: int) -> None:
    """Two ranks together compute every head once; a single key-value head is held by both."""
    torch.manual_seed(0)
    head_dim, q = 8, torch.randn(32, 24)
    k, v = torch.randn(2, kv_heads * head_dim, 24)
    bias = {f"{n}_bias": torch.randn(t.shape[0]) for n, t in (("q", q), ("k", k), ("v", v))}
    x = torch.randn(num_rows, 24)
    outputs = []
    for rank in range(2):
        parts = tuple((n, t.shape[0], head_dim) for n, t in (("q", q), ("k", k), ("v", v)))
        layer = ColumnParallelLinear(24, parts, True, FLOAT, OneOfTwo(rank))
        fill(layer.slots(), q_weight=q, k_weight=k, v_weight=v, **bias)
        outputs.append(layer.forward(x).split([16, head_dim, head_dim], dim=1))
    (q0, k0, v0), (q1, k1, v1) = outputs
    torch.testing.assert_close(torch.cat((q0, q1), 1), linear(x, q, bias["q_bias"]))
    if kv_heads == 2:
        torch.testing.assert_close(torch.cat((k0, k1), 1), linear(x, k, bias["k_bias"]))
        torch.testing.assert_close(torch.cat((v0, v1), 1), linear(x, v, bias["v_bias"]))
    else:
        torch.testing.assert_close(k0, linear(x, k, bias["k_bias"]))
        assert torch.equal(k0, k1) and torch.equal(v0, v1)


@pytest.mark.parametrize("num_rows", [1, 5, 20])
def test_gated_and_row_parallel_sum(num_rows: int) -> None:
    """The partial MLPs of two ranks add up to the whole, with each bias counted once."""
    torch.manual_seed(0)
    gate, up, down = torch.randn(40, 24), torch.randn(40, 24), torch.randn(24, 40)
    gate_bias, up_bias, down_bias = torch.randn(40), torch.randn(40), torch.randn(24)
    x = torch.randn(num_rows, 24)
    total = torch.zeros(num_rows, 24)
    for rank in range(2):
        gated = GatedLinear(24, 40, True, FLOAT, OneOfTwo(rank))
        fill(gated.slots(), gate_weight=gate, up_weight=up, gate_bias=gate_bias, up_bias=up_bias)
        row = RowParallelLinear(40, 24, True, FLOAT, OneOfTwo(rank))
        fill(row.slots(), weight=down, bias=down_bias)
        row.add_to(gated.forward(x), total)
    inner = silu(linear(x, gate, gate_bias)) * linear(x, up, up_bias)
    torch.testing.assert_close(total, linear(inner, down, down_bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab_size", [10, 7])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_shares(vocab_size: int, tied: bool) -> None:
    """Two ranks' embeddings sum to the look-up, also when the vocabulary does not divide."""
    torch.manual_seed(0)
    table = torch.randn(vocab_size, 12)
    ids = torch.arange(vocab_size)
    total = torch.zeros(vocab_size, 12)
    logits = []
    for rank in range(2):
        tp = OneOfTwo(rank)
        head = VocabParallelHead(vocab_size, 12, FLOAT, tp)
        embedding = VocabParallelEmbedding(vocab_size, 12, FLOAT, tp, head if tied else None)
        fill(head.slots(), weight=table)
        fill(embedding.slots(), weight=table)
        total += embedding.forward(ids)
        logits.append(head.weight.product(total.new_ones(3, 12)))
    assert torch.equal(total, table)
    joined = torch.cat(logits, 1)
    torch.testing.assert_close(joined[:, :vocab_size], linear(torch.ones(3, 12), table))
    assert not joined[:, vocab_size:].any()


def test_indivisible_heads_are_refused() -> None:
    """Three key-value heads cannot be shared by two ranks."""
    with pytest.raises(ValueError, match=r"3 .*tensor_parallel_size 2"):
        ColumnParallelLinear(8, (("k", 48, 16),), False, FLOAT, OneOfTwo(0))
    with pytest.raises(ValueError, match=r"3 .*tensor_parallel_size 2"):
        RowParallelLinear(48, 8, False, FLOAT, OneOfTwo(0), unit=16)
    ColumnParallelLinear(8, (("k", 48, 16),), False, FLOAT, SingleRank())


@pytest.mark.parametrize("family", ["llama-bias", "qwen2", "qwen3"])
@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_whole_model_on_two_ranks(family: str, num_kv_heads: int) -> None:
    """Two ranks in two threads give the reference's logits, each with its share of the KV."""
    torch.set_num_threads(1)
    reference = tiny_model(family, num_heads=6, num_kv_heads=num_kv_heads, tied=True)
    ids = list(range(3, 53))
    barrier, box = threading.Barrier(2), [torch.empty(0)] * 2
    results: list[Tensor | None] = [None, None]

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            model = worker_model(reference, tp=ThreadRank(rank, 2, barrier, box))
            steps = PagedSteps(model, kv_pool(reference, 50, 16, num_kv_heads=1))
            sequence = PagedSequence(ids)
            parts = [steps.step([(sequence, count)])[0] for count in (30, 19, 1)]
            results[rank] = torch.cat(parts)
        finally:
            if results[rank] is None:
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = reference_logits(reference, ids)
    for result in results:
        assert result is not None
        assert float((result - expected).abs().max()) < 1e-4
