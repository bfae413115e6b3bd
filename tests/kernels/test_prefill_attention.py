"""Prefill attention against the float32 reference: chunks anywhere, odd shapes, poisoned memory."""

import pytest
import torch
from paged_attention import Heads, Problem, make_problem, relative_error

from cearx.kernels.prefill_attention import (
    PrefillConfig,
    prefill_attention,
    reference_prefill_attention,
)

SHAPES = [
    Heads(num_q_heads=num_q, num_kv_heads=num_kv, head_dim=dim, block_size=size)
    for num_q, num_kv, dim, size in (
        (2, 2, 64, 16),
        (4, 2, 128, 64),
        (9, 3, 64, 16),
        (4, 1, 128, 128),
        (7, 1, 128, 32),
        (8, 1, 64, 256),
    )
]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def run(
    problem: Problem, chunks: list[int], max_q_len: int, config: PrefillConfig | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's output, poisoned before, and the reference's."""
    device = problem.kv_B2KPD.device
    cu_seqlens = torch.tensor([0, *chunks]).cumsum(0).to(device, torch.int32)
    q_TND = problem.queries(sum(chunks) + 2, seed=9)
    out_TND = torch.full(q_TND.shape, torch.nan, dtype=q_TND.dtype, device=device)
    tensors = (
        q_TND,
        problem.kv_B2KPD,
        problem.block_tables_SM,
        problem.seats,
        cu_seqlens,
        problem.lengths,
    )
    prefill_attention(*tensors, out_TND, max_q_len, problem.scale, config=config)
    return out_TND, reference_prefill_attention(*tensors, problem.scale)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_chunks_of_all_kinds(heads: Heads, device: torch.device, on_gpu: bool) -> None:
    """Whole prompts, later chunks, single tokens and empty chunks equal the reference."""
    lengths, chunks = [33, 70, 1, 20, 131], [33, 9, 1, 0, 2]
    if on_gpu:
        lengths, chunks = [*lengths, 1500, 4096], [*chunks, 1500, 700]
    dtypes = [torch.float32, torch.float16, *([torch.bfloat16] if on_gpu else [])]
    for dtype in dtypes:
        problem = make_problem(heads, lengths, dtype=dtype, device=device, seed=3)
        out_TND, expected_TND = run(problem, chunks, max(chunks) + 5, None)
        num_tokens = sum(chunks)
        error = relative_error(out_TND[:num_tokens], expected_TND[:num_tokens])
        assert error < TOLERANCES[dtype], (dtype, error)
        assert bool(out_TND[num_tokens:].isnan().all()), "rows of no chunk were written"


@pytest.mark.parametrize("block_size", [16, 64])
def test_tiles_of_all_sizes(block_size: int, device: torch.device) -> None:
    """Tiles smaller and larger than a block, of rows that cut a token's heads apart."""
    heads = Heads(num_q_heads=3, num_kv_heads=1, head_dim=64, block_size=block_size)
    problem = make_problem(heads, [90, 150], dtype=torch.float32, device=device, seed=6)
    for block_m, block_n in ((16, 32), (64, 16), (32, 64), (128, 128)):
        config = PrefillConfig(block_m, block_n, num_warps=4, num_stages=1)
        out_TND, expected_TND = run(problem, [90, 60], 90, config)
        assert relative_error(out_TND[:150], expected_TND[:150]) < 2e-5, config


def test_later_keys_are_invisible(device: torch.device) -> None:
    """Changing a key changes the outputs of its own and later tokens alone."""
    heads = Heads(num_q_heads=2, num_kv_heads=1, head_dim=16, block_size=16)
    problem = make_problem(heads, [50], dtype=torch.float32, device=device, seed=8)
    before_TND, _ = run(problem, [40], 40, None)
    block = int(problem.block_tables_SM[problem.seats[0], 30 // 16])
    problem.kv_B2KPD[block, :, :, 30 % 16] += 1.0
    after_TND, _ = run(problem, [40], 40, None)
    changed_T = (before_TND[:40] != after_TND[:40]).flatten(1).any(1)
    assert changed_T.tolist() == [token >= 20 for token in range(40)]
