"""Which tokens of a row the filters could keep: a bound, and the gathering of all that reach it.

k spans have a logit that reaches the k-th largest of the spans' maxima; spans' maxima that hold a
share p of all weight are above the end of top_p; min_p is a bound itself. Bounds only need to be on
the safe side. Owns these two kernels and the order keys, integers in the order of the floats; never
decides what is kept. Launched by `sampling_filter`. Legend: R rows, V vocabulary, L tiles.
"""

import triton
import triton.language as tl

from cearx.kernels.dependent_launch import let_next_start, wait_for_previous
from cearx.kernels.sampling_noise import scale_of, weights_of

SLACK = tl.constexpr(1e-4)
"""Relative, by which bounds err on the safe side; more than float32 sums and logarithms lose."""
NOTHING = tl.constexpr(2**31 - 1)
"""A bound that no logit reaches: the row has no filter."""


@triton.jit
def order_key(logits: tl.tensor, SHIFT: tl.constexpr):
    """int32 numbers in the order of float32 ones; bfloat16 values need only the upper 16 bits."""
    bits = logits.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def logit_of_key(key: tl.tensor, SHIFT: tl.constexpr):
    """The inverse of `order_key`."""
    ordered = key << SHIFT
    if SHIFT > 0:
        ordered = tl.where(key < 0, ordered | ((1 << SHIFT) - 1), ordered)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bound_kernel(
    p_seats: tl.tensor,
    p_temperature: tl.tensor,
    p_top_k: tl.tensor,
    p_top_p: tl.tensor,
    p_min_p: tl.tensor,
    p_peak: tl.tensor,
    p_mass: tl.tensor,
    p_span_max: tl.tensor,
    p_bound: tl.tensor,
    p_total: tl.tensor,
    p_num_candidates: tl.tensor,
    V: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_SPANS: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_r = tl.program_id(0)
    seat = tl.load(p_seats + i_r)
    temperature = tl.load(p_temperature + seat)
    top_k = tl.load(p_top_k + seat)
    top_p = tl.load(p_top_p + seat)
    min_p = tl.load(p_min_p + seat)
    has_top_k = (top_k > 0) & (top_k < V)
    scale = scale_of(temperature)

    o_tile = tl.arange(0, BLOCK_TILES)
    is_tile = o_tile < TILES
    b_peak = tl.load(p_peak + i_r * TILES + o_tile, mask=is_tile, other=float("-inf"))
    b_mass = tl.load(p_mass + i_r * TILES + o_tile, mask=is_tile, other=0.0)
    peak = tl.max(b_peak, axis=0)
    is_finite = (peak < float("inf")) & (peak > float("-inf"))
    peak = tl.where(is_finite, peak, 0.0)
    total = tl.sum(b_mass * weights_of(b_peak, peak, scale), axis=0)
    tl.store(p_total + i_r, total)
    tl.store(p_num_candidates + i_r, 0)

    highest = order_key(peak, SHIFT)
    lowest = order_key(peak * 0.0 + float("-inf"), SHIFT)
    bound = lowest
    if (temperature <= 0.0) | (is_finite == 0):
        bound = highest
    elif (has_top_k == 0) & (min_p <= 0.0) & (top_p >= 1.0):
        bound = lowest * 0 + NOTHING
    else:
        if min_p > 0.0:
            floor = peak + (tl.log(min_p) - SLACK) / scale
            bound = order_key(floor - tl.abs(floor) * SLACK, SHIFT)
        by_count = has_top_k & (top_k <= SPANS)
        by_mass = (has_top_k == 0) & (min_p <= 0.0)
        if by_mass:
            floor = peak + (tl.log(tl.maximum(1.0 - top_p, 1e-30) * total / V) - SLACK) / scale
            bound = order_key(floor - tl.abs(floor) * SLACK, SHIFT)
        if by_count | by_mass:
            o_span = tl.arange(0, BLOCK_SPANS)
            b_max = tl.load(
                p_span_max + i_r * SPANS + o_span, mask=o_span < SPANS, other=float("-inf")
            )
            b_keys = order_key(b_max, SHIFT)
            # Masked spans must not count where the bound is the lowest of all.
            b_share = tl.where(o_span < SPANS, 1.0, 0.0)
            wanted = top_k.to(tl.float32)
            if by_mass:
                b_share = b_share * weights_of(b_max, peak, scale)
                wanted = top_p * total * (1.0 + SLACK)
            # The largest key that spans worth `wanted` reach, if there is one above the bound.
            low = bound.to(tl.int64)
            high = highest.to(tl.int64)
            while low < high:
                middle = low + ((high - low + 1) >> 1)
                if tl.sum(tl.where(b_keys >= middle.to(tl.int32), b_share, 0.0), axis=0) >= wanted:
                    low = middle
                else:
                    high = middle - 1
            bound = low.to(tl.int32)
    tl.store(p_bound + i_r, bound)


@triton.jit
def gather_kernel(
    p_logits: tl.tensor,
    p_peak: tl.tensor,
    p_bound: tl.tensor,
    p_num_candidates: tl.tensor,
    p_candidate_logit: tl.tensor,
    p_candidate_id: tl.tensor,
    V: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_r = tl.program_id(0) // TILES
    i_tile = tl.program_id(0) % TILES
    bound = tl.load(p_bound + i_r)
    if order_key(tl.load(p_peak + i_r * TILES + i_tile), SHIFT) >= bound:
        o_v = i_tile * TILE + tl.arange(0, TILE)
        p_row = p_logits + i_r.to(tl.int64) * V
        b_logits = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
        is_kept = (order_key(b_logits, SHIFT) >= bound) & (o_v < V)
        b_one = is_kept.to(tl.int32)
        first = tl.atomic_add(p_num_candidates + i_r, tl.sum(b_one, axis=0), sem="relaxed")
        o_c = first + tl.cumsum(b_one, axis=0) - 1
        is_kept = is_kept & (o_c < MAX_CANDIDATES)
        o_out = i_r * MAX_CANDIDATES + o_c
        tl.store(p_candidate_logit + o_out, b_logits, mask=is_kept)
        tl.store(p_candidate_id + o_out, o_v, mask=is_kept)
