"""What decode kernels share: one step of an online softmax, and rows that are split over programs.

A row of one split writes its output directly. Otherwise each program writes an unnormalised partial
result and counts itself; whoever counts last adds them up and puts the counter back to zero, ready
for the next launch. A second kernel would cost a launch a layer even for short contexts, which need
no sum; the counter costs them nothing. The order of the sum is by split, not by arrival: results
repeat bit for bit. Owns the scratch of the partial results. Called by `decode_attention` and
`position_and_attend`.

R rows, N query heads, K key-value heads, D head_dim.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SPLITS = 64
MAX_GROUP = 16
MAX_PROGRAMS = 384
"""Rows are split only while rows * K * splits stays within this: 256 programs keep the memory
busy, and further splits cost their sum, further programs their start."""


@dataclass(frozen=True, eq=False)
class DecodeScratch:
    """Partial results of split rows; allocated once, before any graph is captured."""

    partials: Tensor
    """[head results, D] float32."""
    maxima: Tensor
    """[head results] float32: the largest score of a split, in base 2."""
    sums: Tensor
    """[head results] float32."""
    arrived: Tensor
    """[rows * K at most] int32: programs of a row and head that are done; zero between launches."""

    def check(self, num_rows: int, num_q_heads: int, num_kv_heads: int, max_splits: int) -> None:
        """Asserts that a launch of so many splits a row has room."""
        if max_splits > 1:
            results = num_rows * num_q_heads * max_splits
            assert results <= self.maxima.shape[0], f"scratch is too small for {num_rows} rows"
            assert num_rows * num_kv_heads <= self.arrived.shape[0]


def make_scratch(
    max_rows: int, num_q_heads: int, head_dim: int, device: torch.device
) -> DecodeScratch:
    """Scratch for launches of up to `max_rows` rows; launches that overlap need one each."""
    heads = max_rows * num_q_heads
    results = min(heads * MAX_SPLITS, MAX_PROGRAMS * min(MAX_GROUP, num_q_heads))
    return DecodeScratch(
        partials=torch.empty(results, head_dim, dtype=torch.float32, device=device),
        maxima=torch.empty(results, dtype=torch.float32, device=device),
        sums=torch.empty(results, dtype=torch.float32, device=device),
        arrived=torch.zeros(heads, dtype=torch.int32, device=device),
    )


def count_splits(num_rows: int, num_kv_heads: int, max_programs: int) -> int:
    """The grid's splits, a power of two that keeps all programs within `max_programs`."""
    fitting = max_programs // (num_rows * num_kv_heads)
    return min(1 << max(fitting.bit_length() - 1, 0), MAX_SPLITS)


def sum_chunk(num_warps: int, group_padded: int) -> int:
    """Splits whose partial results are in the registers at once while they are added up."""
    return max(16 * num_warps // group_padded, 2)


@triton.jit
def softmax_step(scores, b_v, b_max, b_sum, b_acc):
    """The running maximum, sum and weighted values after one more tile of scores, in base 2.

    Scores are -inf where there is no key; the maximum must start finite if a whole tile may be so.
    """
    new_max = tl.maximum(b_max, tl.max(scores, 1))
    rescale = tl.exp2(b_max - new_max)
    b_p = tl.exp2(scores - new_max[:, None])
    b_sum = b_sum * rescale + tl.sum(b_p, 1)
    b_acc = b_acc * rescale[:, None]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    return new_max, b_sum, b_acc


@triton.jit
def _add_up(
    p_partials,
    p_maxima,
    p_sums,
    first_result,
    num_splits,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sum of a row's partial results, [GROUP_PADDED, D], CHUNK splits at a time.

    Loads bypass the first-level cache: other processors wrote these lines.
    """
    o_s = tl.arange(0, CHUNK)[:, None]
    o_g = tl.arange(0, GROUP_PADDED)[None, :]
    o_d = tl.arange(0, HEAD_DIM)[None, None, :]
    b_max = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    b_sum = tl.zeros([GROUP_PADDED], tl.float32)
    b_acc = tl.zeros([GROUP_PADDED, HEAD_DIM], tl.float32)
    for first in tl.range(0, num_splits, CHUNK, num_stages=1):
        in_row = first + o_s < num_splits
        written = in_row & (o_g < GROUP)
        o_result = first_result + (first + o_s) * GROUP + o_g
        maxima = tl.load(p_maxima + o_result, mask=written, other=0.0, cache_modifier=".cg")
        sums = tl.load(p_sums + o_result, mask=written, other=0.0, cache_modifier=".cg")
        partials = tl.load(
            p_partials + o_result[:, :, None] * HEAD_DIM + o_d,
            mask=written[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        maxima = tl.where(in_row, maxima, float("-inf"))
        new_max = tl.maximum(b_max, tl.max(maxima, 0))
        rescale = tl.exp2(b_max - new_max)
        weights = tl.exp2(maxima - new_max[None, :])
        b_sum = b_sum * rescale + tl.sum(sums * weights, 0)
        b_acc = b_acc * rescale[:, None] + tl.sum(partials * weights[:, :, None], 0)
        b_max = new_max
    b_sum = tl.where(b_sum > 0, b_sum, 1.0)
    return b_acc / b_sum[:, None]


@triton.jit
def write_group(
    p_heads,
    b_max,
    b_sum,
    b_acc,
    p_partials,
    p_maxima,
    p_sums,
    p_arrived,
    i_pair,
    i_split,
    num_splits,
    max_splits,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Ends a program: writes the group's output at `p_heads`, or its share of it."""
    o_g = tl.arange(0, ROWS)
    o_d = tl.arange(0, HEAD_DIM)
    in_group = (o_g < GROUP)[:, None] & (o_d >= 0)[None, :]
    if num_splits == 1:
        b_sum = tl.where(b_sum > 0, b_sum, 1.0)
        b_out = b_acc / b_sum[:, None]
        tl.store(
            p_heads + o_g[:, None] * HEAD_DIM + o_d[None, :],
            b_out.to(p_heads.dtype.element_ty),
            mask=in_group,
        )
    else:
        first_result = i_pair * max_splits * GROUP
        o_result = first_result + i_split * GROUP + o_g
        tl.store(p_partials + o_result[:, None] * HEAD_DIM + o_d[None, :], b_acc, mask=in_group)
        tl.store(p_maxima + o_result, b_max, mask=o_g < GROUP)
        tl.store(p_sums + o_result, b_sum, mask=o_g < GROUP)
        # The barrier orders the stores of all threads before the one thread that counts.
        tl.debug_barrier()
        arrived = tl.atomic_add(p_arrived + i_pair, 1, sem="acq_rel", scope="gpu")
        if arrived == num_splits - 1:
            total = _add_up(
                p_partials,
                p_maxima,
                p_sums,
                first_result,
                num_splits,
                GROUP,
                GROUP_PADDED,
                HEAD_DIM,
                CHUNK,
            )
            o_head = tl.arange(0, GROUP_PADDED)
            tl.store(
                p_heads + o_head[:, None] * HEAD_DIM + o_d[None, :],
                total.to(p_heads.dtype.element_ty),
                mask=(o_head < GROUP)[:, None] & (o_d >= 0)[None, :],
            )
            tl.store(p_arrived + i_pair, 0)
