"""Keys and values in e4m3: written rounded once, read exactly, by every kernel of the pool."""

from dataclasses import replace

import pytest
import torch
from paged_attention import Heads, Problem, make_decode_rows, make_problem, relative_error
from torch import Tensor

from cearx.kernels.decode_attention import (
    DecodeConfig,
    decode_attention,
    reference_decode_attention,
)
from cearx.kernels.paged_kv import FP8
from cearx.kernels.position_and_attend import (
    AttendConfig,
    position_and_attend,
    reference_position_and_attend,
)
from cearx.kernels.position_and_store import position_and_store
from cearx.kernels.prefill_attention import prefill_attention, reference_prefill_attention
from cearx.kernels.row_splits import DecodeScratch, make_scratch

SHAPES = [Heads(4, 2, 128, 64), Heads(9, 3, 64, 16), Heads(7, 1, 32, 32)]
DECODE = DecodeConfig(block_n=32, num_warps=4, num_stages=2, min_split=48, max_programs=64)


@pytest.fixture
def dtype(on_gpu: bool) -> torch.dtype:
    """The interpreter's products are right in float32 only."""
    return torch.bfloat16 if on_gpu else torch.float32


def limit(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 8e-2


def in_fp8(problem: Problem) -> Problem:
    """The same with its pool rounded; unwritten memory stays NaN."""
    return replace(problem, kv_B2KPD=problem.kv_B2KPD.float().to(FP8))


def scratch_for(problem: Problem) -> DecodeScratch:
    heads, device = problem.heads, problem.kv_B2KPD.device
    return make_scratch(len(problem.seats), heads.num_q_heads, heads.head_dim, device)


def poisoned(like: Tensor) -> Tensor:
    return torch.full(like.shape, torch.nan, dtype=like.dtype, device=like.device)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_attention_reads_them_exactly(
    heads: Heads, dtype: torch.dtype, device: torch.device
) -> None:
    """Decode rows and chunks equal the reference over the rounded pool, to the type's rounding."""
    exact = make_problem(heads, [1, 97, 70], dtype=dtype, device=device, seed=3)
    problem = in_fp8(exact)
    tables = (problem.block_tables_SM, problem.seats)
    q_RND = exact.queries(3, seed=7)
    out_RND = poisoned(q_RND)
    rest = (problem.lengths, out_RND, scratch_for(problem), problem.scale)
    decode_attention(q_RND, problem.kv_B2KPD, *tables, *rest, config=DECODE)
    wanted_RND = reference_decode_attention(
        q_RND, problem.kv_B2KPD, *tables, problem.lengths, problem.scale
    )
    assert relative_error(out_RND, wanted_RND) < limit(dtype)

    cu_seqlens = torch.tensor([0, 1, 10, 45], dtype=torch.int32, device=device)
    q_TND = exact.queries(45, seed=8)
    out_TND = poisoned(q_TND)
    chunks = (problem.kv_B2KPD, *tables, cu_seqlens, problem.lengths)
    prefill_attention(q_TND, *chunks, out_TND, 40, problem.scale)
    wanted_TND = reference_prefill_attention(q_TND, *chunks, problem.scale)
    assert relative_error(out_TND, wanted_TND) < limit(dtype)


def test_keys_and_values_are_rounded_once_and_saturate(
    dtype: torch.dtype, device: torch.device
) -> None:
    """The pool holds what a cast of the 16- or 32-bit pool gives, 448 where that is beyond."""
    heads, num_tokens = Heads(2, 2, 64, 16), 40
    torch.manual_seed(1)
    qkv_TX = torch.randn(num_tokens, heads.qkv_size, device=device).mul_(200).to(dtype)
    angles = torch.randn(num_tokens, heads.head_dim // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slots_T = torch.randperm(6 * heads.block_size, device=device)[:num_tokens]
    shape = (6, 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
    pools = [torch.full(shape, 7.0, device=device).to(kind) for kind in (dtype, FP8)]
    for pool in pools:
        position_and_store(
            qkv_TX.clone(),
            None,
            None,
            1e-6,
            cos_sin,
            torch.arange(num_tokens, device=device),
            slots_T,
            pool,
            num_q_heads=heads.num_q_heads,
            num_kv_heads=heads.num_kv_heads,
        )
    wanted = pools[0].float().clamp(-448, 448).to(FP8)
    assert torch.equal(pools[1].float(), wanted.float())
    assert bool((pools[0].float().abs() > 460).any()) and bool((wanted.float() == 448).any())


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_a_step_attends_to_its_own_rounded_key(
    heads: Heads, early: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """As if the new key and value had been written and read again: later steps see no other."""
    exact = make_problem(heads, [1, 65, 130], dtype=dtype, device=device, seed=5)
    rows = make_decode_rows(exact, with_norm=True, seed=2)
    rows = replace(rows, problem=in_fp8(rows.problem))
    problem = rows.problem
    shape = (3, heads.num_q_heads, heads.head_dim)
    out_RND = torch.full(shape, torch.nan, dtype=dtype, device=device)
    wanted_RND, wanted_pool = reference_position_and_attend(*rows.arguments(), problem.scale)
    config = AttendConfig(32, 4, 2, min_split=48, max_programs=64, early=early)
    position_and_attend(
        *rows.arguments(), out_RND, scratch_for(problem), problem.scale, config=config
    )
    # A number next to the middle of two e4m3 numbers may be rounded to either.
    different = problem.kv_B2KPD.float() != wanted_pool
    different &= ~(problem.kv_B2KPD.float().isnan() & wanted_pool.isnan())
    written = 3 * 2 * heads.num_kv_heads * heads.head_dim
    assert int(different.sum()) <= written * (0 if dtype == torch.float32 else 0.1)
    assert relative_error(out_RND, wanted_RND) < limit(dtype)
