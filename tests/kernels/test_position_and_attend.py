"""The fused attention of decode rows: against float32, the two kernels, and its own mutations."""

import importlib
import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from paged_attention import (
    DecodeRows,
    Heads,
    Problem,
    make_decode_rows,
    make_problem,
    relative_error,
)
from torch import Tensor

from cearx.kernels import position_and_attend as fused
from cearx.kernels.decode_attention import DecodeConfig, decode_attention
from cearx.kernels.position_and_attend import AttendConfig
from cearx.kernels.position_and_store import position_and_store
from cearx.kernels.row_splits import MAX_SPLITS, DecodeScratch, count_splits, make_scratch

SHAPES = [
    Heads(num_q_heads=num_q, num_kv_heads=num_kv, head_dim=dim, block_size=size)
    for num_q, num_kv, dim, size in (
        (1, 1, 64, 16),
        (4, 2, 128, 64),
        (6, 2, 64, 32),
        (4, 1, 32, 128),
        (14, 2, 128, 16),
        (8, 1, 64, 256),
        (16, 1, 32, 64),
    )
]
"""Groups of 1, 2, 3, 4, 7, 8 and 16."""
CONTEXTS = [1, 2, 63, 64, 65, 257, 1000]
TILES = AttendConfig(block_n=32, num_warps=4, num_stages=2, min_split=48, max_programs=64)
"""Splits short rows too, so that small problems meet every path with few programs."""


def poisoned_scratch(problem: Problem) -> DecodeScratch:
    heads, device = problem.heads, problem.kv_B2KPD.device
    scratch = make_scratch(len(problem.seats), heads.num_q_heads, heads.head_dim, device)
    for tensor in (scratch.partials, scratch.maxima, scratch.sums):
        tensor.fill_(torch.nan)
    return scratch


def run(
    rows: DecodeRows, config: AttendConfig | None, module: ModuleType = fused
) -> tuple[Tensor, Tensor]:
    """(output, pool afterwards) of a launch into poisoned memory; the rows stay as they are."""
    problem = rows.problem
    heads, pool = problem.heads, problem.kv_B2KPD
    shape = (len(problem.seats), heads.num_q_heads, heads.head_dim)
    out_RND = torch.full(shape, torch.nan, dtype=pool.dtype, device=pool.device)
    scratch = poisoned_scratch(problem)
    qkv_RX, kv_B2KPD = rows.qkv_RX.clone(), pool.clone()
    qkv, *others = rows.arguments()
    others[4] = kv_B2KPD
    module.position_and_attend(qkv, *others, out_RND, scratch, problem.scale, config=config)
    assert torch.equal(rows.qkv_RX, qkv_RX), "qkv was changed"
    assert not scratch.arrived.any(), "a counter was not put back"
    return out_RND, kv_B2KPD


def check(rows: DecodeRows, config: AttendConfig | None, module: ModuleType = fused) -> None:
    """The output is the reference's, and not a byte beside the last tokens' slots was written."""
    dtype = rows.qkv_RX.dtype
    limit = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}[dtype]
    out_RND, kv_B2KPD = run(rows, config, module)
    expected_RND, expected_kv = fused.reference_position_and_attend(
        *rows.arguments(),  # type: ignore[arg-type]
        rows.problem.scale,
    )
    assert relative_error(out_RND, expected_RND) < limit
    slots_R, size = rows.slots_R, rows.problem.heads.block_size
    here = (slots_R // size, slice(None), slice(None), slots_R % size)
    assert relative_error(kv_B2KPD[here], expected_kv[here].float()) < limit
    kv_B2KPD[here] = rows.problem.kv_B2KPD[here]
    assert torch.equal(kv_B2KPD.nan_to_num(nan=7.0), rows.problem.kv_B2KPD.nan_to_num(nan=7.0))


def two_kernels(rows: DecodeRows) -> tuple[Tensor, Tensor]:
    """(output, pool afterwards) of the way that steps with prompts go."""
    problem = rows.problem
    heads, kv_B2KPD, qkv_RX = problem.heads, problem.kv_B2KPD.clone(), rows.qkv_RX.clone()
    position_and_store(
        qkv_RX,
        rows.q_norm_D,
        rows.k_norm_D,
        rows.eps,
        rows.cos_sin_LD,
        problem.lengths.long() - 1,
        rows.slots_R,
        kv_B2KPD,
        num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads,
    )
    q_RX = qkv_RX[:, : heads.num_q_heads * heads.head_dim]
    q_RND = q_RX.unflatten(1, (heads.num_q_heads, heads.head_dim))
    out_RND = torch.empty_like(q_RND)
    tables = (problem.block_tables_SM, problem.seats, problem.lengths)
    scratch = poisoned_scratch(problem)
    config = DecodeConfig(32, 4, 2, min_split=48, max_programs=32)
    decode_attention(q_RND, kv_B2KPD, *tables, out_RND, scratch, problem.scale, config=config)
    return out_RND, kv_B2KPD


def make_rows(
    heads: Heads,
    lengths: list[int],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    with_norm: bool = True,
) -> DecodeRows:
    problem = make_problem(heads, lengths, dtype=dtype, device=device, seed=len(lengths))
    return make_decode_rows(problem, with_norm=with_norm, seed=3)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_rows_of_all_lengths(heads: Heads, early: bool, device: torch.device, on_gpu: bool) -> None:
    """Mixed lengths, one split and several, equal the reference in every type."""
    types = [torch.float32, torch.float16, *([torch.bfloat16] if on_gpu else [])]
    lengths = CONTEXTS if on_gpu or heads.head_dim < 128 else CONTEXTS[:-1]
    for dtype in types if on_gpu or early else types[:1]:
        with_norm = dtype != torch.float16 or on_gpu
        rows = make_rows(heads, lengths, device, dtype=dtype, with_norm=with_norm)
        check(rows, replace(TILES, early=early))
        if on_gpu:
            check(rows, None)


@pytest.mark.parametrize("with_norm", [False, True])
def test_equals_the_two_kernels(with_norm: bool, device: torch.device, on_gpu: bool) -> None:
    """Keys and values in the pool to the bit, outputs but for the order of their sums."""
    for heads in (Heads(4, 2, 128, 64), Heads(7, 1, 64, 16)):
        for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if on_gpu else [])):
            rows = make_rows(heads, [1, 40, 130], device, dtype=dtype, with_norm=with_norm)
            out_RND, kv_B2KPD = run(rows, TILES)
            expected_RND, expected_kv = two_kernels(rows)
            pools = kv_B2KPD.nan_to_num(nan=7.0), expected_kv.nan_to_num(nan=7.0)
            if on_gpu:
                assert (pools[0] != pools[1]).sum() < 4
            else:
                assert torch.equal(*pools)
            limit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
            assert relative_error(out_RND, expected_RND.float()) < limit


def test_tiles_within_and_across_blocks(device: torch.device) -> None:
    """A tile may be smaller than a block, as large, or span several."""
    for block_size in (16, 64, 256):
        rows = make_rows(Heads(3, 1, 64, block_size), [302, 65], device)
        for block_n, early in ((32, True), (64, False), (128, True)):
            config = AttendConfig(block_n, 4, 2, min_split=100, max_programs=16, early=early)
            check(rows, config)


def test_any_number_of_rows(device: torch.device) -> None:
    """1, 3 and 17 rows, whose splits follow from their number, as the checked-in table says."""
    for count in (1, 3, 17):
        lengths = [(37 * row) % 140 + 1 for row in range(count)]
        check(make_rows(Heads(2, 1, 32, 16), lengths, device), None)


def test_many_splits_are_added_in_chunks(device: torch.device) -> None:
    """A long row alone has more splits than are added up at once."""
    rows = make_rows(Heads(8, 1, 32, 16), [514], device)
    check(rows, AttendConfig(block_n=16, num_warps=4, num_stages=2, min_split=15))


def test_launches_repeat_bit_for_bit(device: torch.device) -> None:
    """The order of a row's sum is by split, whoever comes last."""
    rows = make_rows(Heads(3, 1, 64, 32), [150, 400, 3], device)
    outputs = [run(rows, TILES)[0] for _ in range(3)]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_padded_rows_are_harmless(device: torch.device) -> None:
    """Rows of the spare seat write the spare block only; a row without a token writes nothing."""
    rows = make_rows(Heads(4, 2, 64, 16), [70, 1, 1, 1], device)
    problem = rows.problem
    spare_block = len(problem.kv_B2KPD) - 1
    problem.seats[1:3] = len(problem.block_tables_SM) - 1
    problem.block_tables_SM[-1] = spare_block
    problem.seats[3] = problem.seats[0]
    problem.lengths[3] = 0
    out_RND, kv_B2KPD = run(rows, TILES)
    assert bool(out_RND.isfinite().all()) and not out_RND[3].any()
    alone = replace(
        rows,
        problem=replace(problem, seats=problem.seats[:1], lengths=problem.lengths[:1]),
        qkv_RX=rows.qkv_RX[:1],
    )
    check(alone, TILES)
    expected_RND, expected_kv = run(alone, TILES)
    torch.testing.assert_close(out_RND[:1], expected_RND, rtol=1e-5, atol=1e-5)
    assert torch.equal(kv_B2KPD[:-1].nan_to_num(7.0), expected_kv[:-1].nan_to_num(7.0))
    written = ~kv_B2KPD[-1].isnan()
    assert bool(written[:, :, 0].all()) and not written[:, :, 1:].any()


def test_large_scores_stay_finite(device: torch.device) -> None:
    """Scores far outside the exponent's range still give a weighted mean of values."""
    rows = make_rows(SHAPES[1], [200, 33], device)
    rows.problem.kv_B2KPD[:, 0] *= 300
    out_RND, _ = run(rows, TILES)
    expected_RND, _ = fused.reference_position_and_attend(
        *rows.arguments(),  # type: ignore[arg-type]
        rows.problem.scale,
    )
    assert relative_error(out_RND, expected_RND) < 1e-3


def test_every_launch_fits_the_scratch() -> None:
    """The grid's splits never need more than make_scratch gives, whatever the rows."""
    for num_kv_heads, group in ((1, 16), (3, 3), (4, 7), (8, 4), (8, 2), (40, 1)):
        num_q_heads = num_kv_heads * group
        scratch = make_scratch(256, num_q_heads, 32, torch.device("cpu"))
        for num_rows in range(1, 257):
            for key_bytes in (64, 128, 256, 512):
                config = fused.choose_config(num_rows, num_kv_heads, key_bytes)
                splits = count_splits(num_rows, num_kv_heads, config.max_programs)
                assert 1 <= splits <= MAX_SPLITS
                scratch.check(num_rows, num_q_heads, num_kv_heads, splits)


MUTATIONS = {
    "turns the wrong way": ("rotary_heads", " - high * sin", " + high * sin"),
    "turns by the wrong half": ("rotary_heads", " + low * sin", " + high * sin"),
    "reads the stale slot": ("position_and_attend", "(position < cached)", "(position <= cached)"),
    "forgets the norm": ("position_and_attend", "HAS_NORM=q_norm_D is not None", "HAS_NORM=False"),
    "takes the query's weights": (
        "rotary_heads",
        "is_query[:, None], q_low, k_low",
        "True, q_low, k_low",
    ),
    "leaves out the new token": (
        "position_and_attend",
        "(o_r >= 0), 1.0, 0.0)",
        "(o_r >= 0), 0.0, 0.0)",
    ),
    "writes one slot on": (
        "position_and_attend",
        "+ cached % BLOCK_SIZE",
        "+ (cached + 1) % BLOCK_SIZE",
    ),
    "writes in every split": (
        "position_and_attend",
        "(i_split == num_splits - 1) &",
        "(i_split >= 0) &",
    ),
    "skips a tile": (
        "position_and_attend",
        "first = i_split * BLOCK_N",
        "first = (i_split + 1) * BLOCK_N",
    ),
    "takes another position": (
        "position_and_attend",
        "(p_cos_sin, cached,",
        "(p_cos_sin, cached // 2,",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mutations_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A kernel with one mistake planted fails the check that the true one passes."""
    rows = make_rows(Heads(2, 1, 32, 16), [1, 130, 64], device)
    check(rows, TILES)
    module, text, replacement = MUTATIONS[name]
    number = list(MUTATIONS).index(name)
    monkeypatch.syspath_prepend(tmp_path)
    for part in ("rotary_heads", "position_and_attend"):
        spec = importlib.util.find_spec(f"cearx.kernels.{part}")
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).read_text()
        if part == module:
            assert source.count(text) == 1, f"{text!r} stands {source.count(text)} times"
            source = source.replace(text, replacement)
        source = source.replace("cearx.kernels.rotary_heads", f"mutant_{number}_rotary_heads")
        (tmp_path / f"mutant_{number}_{part}.py").write_text(source)
    mutant = importlib.import_module(f"mutant_{number}_position_and_attend")
    with pytest.raises(AssertionError):
        check(rows, TILES, mutant)
