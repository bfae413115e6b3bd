"""top_k, then min_p, then top_p, and the race of what they keep, without sorting a row.

A filter is a threshold on logits and, for tokens equal to it, on ids. `sampling_bound` finds the
candidates, usually few; one program a row bisects for the thresholds among them, and a row with too
many reads all its logits instead. Weights are exp((logit - peak) / temperature), summed as integers
because the order of candidates varies and sums must not. Owns the launches and this kernel; called
by `sampling`. Legend: R rows, V vocabulary, L tiles, C candidates.
"""

import torch
import triton
import triton.language as tl

from cearx.kernels import dependent_launch
from cearx.kernels.dependent_launch import let_next_start, wait_for_previous
from cearx.kernels.sampling_bound import (
    NOTHING,
    bound_kernel,
    gather_kernel,
    logit_of_key,
    order_key,
)
from cearx.kernels.sampling_noise import row_start, scale_of, token_noise, weights_of
from cearx.kernels.sampling_state import (
    MAX_CANDIDATES,
    SPAN,
    TILE,
    SamplingScratch,
    SamplingTable,
)
from cearx.kernels.sampling_tiles import combine_tiles, write_token

UNIT = tl.constexpr(2.0**40)
"""Weights are summed in parts of this."""
CHUNK_OF_CANDIDATES = 1024
CHUNK_OF_ROW = 8192


@triton.jit
def _chunk(
    p_logit: tl.tensor,
    p_id: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    CHUNK: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The next logits, their order keys and ids, and which of them exist."""
    o_c = first + tl.arange(0, CHUNK)
    exists = o_c < count
    b_logits = tl.load(p_logit + o_c, mask=exists, other=float("-inf")).to(tl.float32)
    if WHOLE_ROW:
        b_ids = o_c
    else:
        b_ids = tl.load(p_id + o_c, mask=exists, other=0)
    return b_logits, order_key(b_logits, SHIFT), b_ids, exists


@triton.jit
def _count_from(
    p_logit: tl.tensor,
    p_id: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    last_id: tl.tensor,
    CHUNK: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """How many have a key in low..high and an id up to last_id."""
    b_count = tl.zeros((CHUNK,), tl.int32)
    first = count * 0
    while first < count:
        _, b_keys, b_ids, exists = _chunk(p_logit, p_id, first, count, CHUNK, WHOLE_ROW, SHIFT)
        is_in = exists & (b_keys >= low) & (b_keys <= high) & (b_ids <= last_id)
        b_count += is_in.to(tl.int32)
        first += CHUNK
    return tl.sum(b_count, axis=0)


@triton.jit
def _mass_from(
    p_logit: tl.tensor,
    p_id: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    min_p: tl.tensor,
    CHUNK: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The weight of those with a key from `low` on that min_p keeps, in units."""
    b_mass = tl.zeros((CHUNK,), tl.int64)
    first = count * 0
    while first < count:
        b_logits, b_keys, _, exists = _chunk(p_logit, p_id, first, count, CHUNK, WHOLE_ROW, SHIFT)
        b_weights = weights_of(b_logits, peak, scale)
        is_in = exists & (b_keys >= low) & (b_weights >= min_p)
        b_mass += tl.where(is_in, b_weights * UNIT, 0.0).to(tl.int64)
        first += CHUNK
    return tl.sum(b_mass, axis=0)


@triton.jit
def _filtered_race(
    p_logit: tl.tensor,
    p_id: tl.tensor,
    count: tl.tensor,
    bound: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    top_k: tl.tensor,
    min_p: tl.tensor,
    top_p: tl.tensor,
    total: tl.tensor,
    is_greedy: tl.tensor,
    start: tl.tensor,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The token that wins among the kept ones."""
    highest = order_key(peak, SHIFT)
    least = bound
    if top_k > 0:
        # The largest key that k tokens reach.
        low = bound.to(tl.int64)
        high = highest.to(tl.int64)
        while low < high:
            middle = low + ((high - low + 1) >> 1)
            reached = _count_from(
                p_logit, p_id, count, middle.to(tl.int32), highest, V, CHUNK, WHOLE_ROW, SHIFT
            )
            if reached >= top_k:
                low = middle
            else:
                high = middle - 1
        least = low.to(tl.int32)
    last_id = least * 0 + V
    if top_p < 1.0:
        if (top_k > 0) | (min_p > 0.0):
            units = _mass_from(
                p_logit, p_id, count, least, peak, scale, min_p, CHUNK, WHOLE_ROW, SHIFT
            )
        else:
            units = (total * UNIT).to(tl.int64)
        wanted = tl.maximum((units.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
        # The smallest key with less than `wanted` above it.
        low = least.to(tl.int64)
        high = highest.to(tl.int64)
        while low < high:
            middle = low + ((high - low) >> 1)
            above = _mass_from(
                p_logit,
                p_id,
                count,
                (middle + 1).to(tl.int32),
                peak,
                scale,
                min_p,
                CHUNK,
                WHOLE_ROW,
                SHIFT,
            )
            if above < wanted:
                high = middle
            else:
                low = middle + 1
        least = low.to(tl.int32)
        # Of the tokens equal to the last kept one, the lowest ids that fill the share are kept.
        above = _mass_from(
            p_logit, p_id, count, least + 1, peak, scale, min_p, CHUNK, WHOLE_ROW, SHIFT
        )
        equal = _count_from(p_logit, p_id, count, least, least, V, CHUNK, WHOLE_ROW, SHIFT)
        weight = (weights_of(logit_of_key(least, SHIFT), peak, scale) * UNIT).to(tl.int64)
        if weight * equal > wanted - above:
            allowed = tl.maximum((wanted - above + weight - 1) // weight, 1)
            low_id = least * 0
            high_id = least * 0 + V - 1
            while low_id < high_id:
                middle_id = (low_id + high_id) >> 1
                reached = _count_from(
                    p_logit, p_id, count, least, least, middle_id, CHUNK, WHOLE_ROW, SHIFT
                )
                if reached >= allowed:
                    high_id = middle_id
                else:
                    low_id = middle_id + 1
            last_id = low_id
    best = peak * 0.0 - 1.0
    token = least * 0 + V
    first = count * 0
    while first < count:
        b_logits, b_keys, b_ids, exists = _chunk(
            p_logit, p_id, first, count, CHUNK, WHOLE_ROW, SHIFT
        )
        b_weights = weights_of(b_logits, peak, scale)
        is_kept = exists & (b_weights >= min_p)
        is_kept = is_kept & ((b_keys > least) | ((b_keys == least) & (b_ids <= last_id)))
        b_noise = tl.where(is_greedy, 1.0, token_noise(start, b_ids))
        b_race = tl.where(is_kept, b_weights / b_noise, -1.0)
        chunk_best = tl.max(b_race, axis=0)
        chunk_token = tl.min(tl.where(is_kept & (b_race == chunk_best), b_ids, V), axis=0)
        is_better = (chunk_best > best) | ((chunk_best == best) & (chunk_token < token))
        token = tl.where(is_better, chunk_token, token)
        best = tl.maximum(best, chunk_best)
        first += CHUNK
    return token


@triton.jit(do_not_specialize=["spare_seat"])
def _filter_kernel(
    p_logits: tl.tensor,
    p_seats: tl.tensor,
    p_temperature: tl.tensor,
    p_top_k: tl.tensor,
    p_top_p: tl.tensor,
    p_min_p: tl.tensor,
    p_seed: tl.tensor,
    p_num_outputs: tl.tensor,
    p_num_tokens: tl.tensor,
    p_last_token: tl.tensor,
    p_tokens: tl.tensor,
    p_peak: tl.tensor,
    p_logit: tl.tensor,
    p_noise: tl.tensor,
    p_winner: tl.tensor,
    p_bound: tl.tensor,
    p_total: tl.tensor,
    p_num_candidates: tl.tensor,
    p_candidate_logit: tl.tensor,
    p_candidate_id: tl.tensor,
    spare_seat: tl.tensor,
    V: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    CHUNK_OF_CANDIDATES: tl.constexpr,
    CHUNK_OF_ROW: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_r = tl.program_id(0)
    seat = tl.load(p_seats + i_r)
    temperature = tl.load(p_temperature + seat)
    is_greedy = temperature <= 0.0
    scale = scale_of(temperature)
    bound = tl.load(p_bound + i_r)
    peak, token = combine_tiles(
        p_peak, p_logit, p_noise, p_winner, i_r, scale, V, TILES, BLOCK_TILES, False
    )
    is_finite = (peak < float("inf")) & (peak > float("-inf"))
    if is_finite & (bound != NOTHING):
        top_k = tl.load(p_top_k + seat)
        top_k = tl.where(is_greedy | (top_k >= V), 0, top_k)
        top_p = tl.where(is_greedy, 1.0, tl.load(p_top_p + seat))
        min_p = tl.where(is_greedy, 0.0, tl.load(p_min_p + seat))
        total = tl.load(p_total + i_r)
        start = row_start(tl.load(p_seed + seat), tl.load(p_num_outputs + seat))
        count = tl.load(p_num_candidates + i_r)
        if count <= MAX_CANDIDATES:
            token = _filtered_race(
                p_candidate_logit + i_r * MAX_CANDIDATES,
                p_candidate_id + i_r * MAX_CANDIDATES,
                count,
                bound,
                peak,
                scale,
                top_k,
                min_p,
                top_p,
                total,
                is_greedy,
                start,
                V,
                CHUNK_OF_CANDIDATES,
                False,
                SHIFT,
            )
        else:
            token = _filtered_race(
                p_logits + i_r.to(tl.int64) * V,
                p_candidate_id,
                count * 0 + V,
                bound,
                peak,
                scale,
                top_k,
                min_p,
                top_p,
                total,
                is_greedy,
                start,
                V,
                CHUNK_OF_ROW,
                True,
                SHIFT,
            )
    write_token(
        p_tokens, p_num_outputs, p_num_tokens, p_last_token, i_r, seat, spare_seat, peak, token
    )


def launch_filter(
    logits_RV: torch.Tensor,
    seats_R: torch.Tensor,
    sampling: SamplingTable,
    tokens_out_R: torch.Tensor,
    scratch: SamplingScratch,
) -> None:
    """The stages after the tiles' for a batch that has filters; arguments as of `sample`."""
    num_rows, vocab_size = logits_RV.shape
    tiles = scratch.peak_RL.shape[1]
    spans = tiles * TILE // SPAN
    shift = 16 if logits_RV.dtype == torch.bfloat16 else 0
    pdl = dependent_launch.ENABLED
    options = dependent_launch.launch_options()
    bound_kernel[(num_rows,)](
        seats_R,
        sampling.temperature_S,
        sampling.top_k_S,
        sampling.top_p_S,
        sampling.min_p_S,
        scratch.peak_RL,
        scratch.mass_RL,
        scratch.span_max,
        scratch.bound_R,
        scratch.total_R,
        scratch.num_candidates_R,
        V=vocab_size,
        TILES=tiles,
        BLOCK_TILES=triton.next_power_of_2(tiles),
        SPANS=spans,
        BLOCK_SPANS=triton.next_power_of_2(spans),
        SHIFT=shift,
        PDL=pdl,
        num_warps=8,
        **options,
    )
    gather_kernel[(num_rows * tiles,)](
        logits_RV,
        scratch.peak_RL,
        scratch.bound_R,
        scratch.num_candidates_R,
        scratch.candidate_logit_RC,
        scratch.candidate_id_RC,
        V=vocab_size,
        TILES=tiles,
        TILE=TILE,
        MAX_CANDIDATES=MAX_CANDIDATES,
        SHIFT=shift,
        PDL=pdl,
        num_warps=4,
        **options,
    )
    _filter_kernel[(num_rows,)](
        logits_RV,
        seats_R,
        sampling.temperature_S,
        sampling.top_k_S,
        sampling.top_p_S,
        sampling.min_p_S,
        sampling.seed_S,
        sampling.num_outputs_S,
        sampling.num_tokens_S,
        sampling.last_token_S,
        tokens_out_R,
        scratch.peak_RL,
        scratch.logit_RL,
        scratch.noise_RL,
        scratch.winner_RL,
        scratch.bound_R,
        scratch.total_R,
        scratch.num_candidates_R,
        scratch.candidate_logit_RC,
        scratch.candidate_id_RC,
        len(sampling.last_token_S) - 1,
        V=vocab_size,
        TILES=tiles,
        BLOCK_TILES=triton.next_power_of_2(tiles),
        MAX_CANDIDATES=MAX_CANDIDATES,
        CHUNK_OF_CANDIDATES=CHUNK_OF_CANDIDATES,
        CHUNK_OF_ROW=CHUNK_OF_ROW,
        SHIFT=shift,
        PDL=pdl,
        num_warps=8,
        **options,
    )
