"""Decode attention against the float32 reference: odd shapes, split rows, poisoned memory."""

import pytest
import torch
from paged_attention import Heads, Problem, make_problem, relative_error

from cearx.kernels.decode_attention import (
    DecodeConfig,
    choose_config,
    decode_attention,
    reference_decode_attention,
)
from cearx.kernels.row_splits import DecodeScratch, count_splits, make_scratch

SHAPES = [
    Heads(num_q_heads=num_q, num_kv_heads=num_kv, head_dim=dim, block_size=size)
    for num_q, num_kv, dim, size in (
        (1, 1, 64, 16),
        (4, 2, 128, 64),
        (9, 3, 64, 16),
        (8, 2, 128, 128),
        (14, 2, 128, 32),
        (16, 2, 64, 64),
        (5, 1, 16, 256),
    )
]
TILES = DecodeConfig(block_n=32, num_warps=4, num_stages=2, min_split=48, max_programs=64)
"""Splits short rows too, so that small problems meet every path with few programs."""


def poisoned_scratch(problem: Problem, num_rows: int) -> DecodeScratch:
    heads = problem.heads
    device = problem.kv_B2KPD.device
    scratch = make_scratch(num_rows, heads.num_q_heads, heads.head_dim, device)
    for tensor in (scratch.partials, scratch.maxima, scratch.sums):
        tensor.fill_(torch.nan)
    return scratch


def error_of(problem: Problem, config: DecodeConfig | None, scratch: DecodeScratch) -> float:
    """Runs the kernel into a poisoned output."""
    q_RND = problem.queries(problem.seats.shape[0], seed=7)
    out_RND = torch.full(q_RND.shape, torch.nan, dtype=q_RND.dtype, device=q_RND.device)
    tensors = (q_RND, problem.kv_B2KPD, problem.block_tables_SM, problem.seats, problem.lengths)
    decode_attention(*tensors, out_RND, scratch, problem.scale, config=config)
    return relative_error(out_RND, reference_decode_attention(*tensors, problem.scale))


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]


def types(on_gpu: bool) -> list[torch.dtype]:
    """The interpreter's products in bfloat16 are wrong, so only a GPU runs it."""
    return [torch.float32, torch.float16, *([torch.bfloat16] if on_gpu else [])]


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_rows_of_all_lengths(heads: Heads, device: torch.device, on_gpu: bool) -> None:
    """Mixed lengths, one split and several, equal the reference in every type."""
    lengths = [1, 97, 32, 200]
    if on_gpu:
        lengths += [9000, 4096, 1023, 15]
    for dtype in types(on_gpu):
        problem = make_problem(heads, lengths, dtype=dtype, device=device, seed=3)
        scratch = poisoned_scratch(problem, len(lengths))
        for config in (TILES, None) if on_gpu else (TILES,):
            assert error_of(problem, config, scratch) < tolerance(dtype), (dtype, config)


def test_tiles_within_and_across_blocks(device: torch.device) -> None:
    """A tile may be smaller than a block, as large, or span several."""
    for block_size in (16, 64, 256):
        heads = Heads(num_q_heads=6, num_kv_heads=2, head_dim=64, block_size=block_size)
        problem = make_problem(heads, [301, 64], dtype=torch.float32, device=device, seed=5)
        scratch = poisoned_scratch(problem, 2)
        for block_n in (32, 64, 128):
            config = DecodeConfig(
                block_n, num_warps=4, num_stages=2, min_split=100, max_programs=16
            )
            assert error_of(problem, config, scratch) < 2e-5, (block_size, block_n)


def test_launches_repeat_bit_for_bit(device: torch.device) -> None:
    """Counters are back at zero after a launch, and the same problem gives the same bits."""
    problem = make_problem(SHAPES[2], [150, 400, 3], dtype=torch.float32, device=device, seed=1)
    scratch = poisoned_scratch(problem, 3)
    q_RND = problem.queries(3, seed=7)
    outputs = []
    for _ in range(3):
        out_RND = torch.full(q_RND.shape, torch.nan, device=device)
        tensors = (q_RND, problem.kv_B2KPD, problem.block_tables_SM, problem.seats)
        decode_attention(*tensors, problem.lengths, out_RND, scratch, problem.scale, config=TILES)
        assert not scratch.arrived.any()
        outputs.append(out_RND)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_many_splits_are_added_in_chunks(device: torch.device) -> None:
    """A long row at R = 1 has more splits than are added up at once."""
    heads = Heads(num_q_heads=8, num_kv_heads=1, head_dim=16, block_size=16)
    problem = make_problem(heads, [509], dtype=torch.float32, device=device, seed=2)
    config = DecodeConfig(block_n=16, num_warps=4, num_stages=2, min_split=15)
    scratch = poisoned_scratch(problem, 1)
    assert error_of(problem, config, scratch) < 2e-5
    assert int(scratch.sums.isfinite().sum()) == 8 * 32  # 509 / 15 asks for 33


def test_a_row_without_tokens_is_zero(device: torch.device) -> None:
    """Length 0 reads no key and stops no other row."""
    problem = make_problem(SHAPES[1], [40, 20], dtype=torch.float32, device=device, seed=2)
    problem.lengths[1] = 0
    problem.block_tables_SM[problem.seats[1], :] = 0
    q_RND = problem.queries(2, seed=7)
    out_RND = torch.full(q_RND.shape, torch.nan, device=device)
    scratch = poisoned_scratch(problem, 2)
    tensors = (q_RND, problem.kv_B2KPD, problem.block_tables_SM, problem.seats, problem.lengths)
    decode_attention(*tensors, out_RND, scratch, problem.scale)
    assert not out_RND[1].any() and bool(out_RND[0].isfinite().all())


def test_large_scores_stay_finite(device: torch.device) -> None:
    """Scores far outside the exponent's range still give a weighted mean of values."""
    problem = make_problem(SHAPES[1], [200, 33], dtype=torch.float32, device=device, seed=4)
    problem.kv_B2KPD[:, 0] *= 300
    assert error_of(problem, TILES, poisoned_scratch(problem, 2)) < 1e-3


def test_every_launch_fits_the_scratch() -> None:
    """The grid's splits never need more than make_scratch gives, whatever the rows."""
    for num_kv_heads, group in ((1, 16), (3, 3), (4, 7), (8, 4), (8, 2), (40, 1)):
        num_q_heads = num_kv_heads * group
        scratch = make_scratch(256, num_q_heads, 16, torch.device("cpu"))
        for num_rows in range(1, 257):
            config = choose_config(num_rows, num_kv_heads, 256)
            splits = count_splits(num_rows, num_kv_heads, config.max_programs)
            assert 1 <= splits <= 64
            if splits > 1:
                assert num_rows * num_q_heads * splits <= scratch.sums.shape[0]
                assert num_rows * num_kv_heads <= scratch.arrived.shape[0]
