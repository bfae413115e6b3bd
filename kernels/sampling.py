"""From logits to tokens on the device: argmax, the race of all tokens, or a race of filtered ones.

A row's vocabulary is split into tiles, so that one row fills the card: every tile finds its largest
logit and its winner, then one program a row compares the tiles' winners on equal terms and writes
the token into its seat. The noise and the filters are those of the worker's sampler on the CPU,
which is the reference, in float32. Owns the launches and these two kernels; the filters' kernels
are in `sampling_filter`. Called last in a step. Legend: R rows, S seats, V vocabulary, L tiles.
"""

from typing import Literal

import torch
import triton
import triton.language as tl

from cearx.kernels import dependent_launch
from cearx.kernels.dependent_launch import let_next_start, wait_for_previous
from cearx.kernels.sampling_filter import launch_filter
from cearx.kernels.sampling_noise import row_start, scale_of, token_noise, weights_of
from cearx.kernels.sampling_state import SPAN, TILE, SamplingScratch, SamplingTable
from cearx.kernels.sampling_tiles import combine_tiles, write_token

Mode = Literal["greedy", "plain", "filtered"]


@triton.jit
def _tile_kernel(
    p_logits: tl.tensor,
    p_seats: tl.tensor,
    p_temperature: tl.tensor,
    p_top_k: tl.tensor,
    p_top_p: tl.tensor,
    p_min_p: tl.tensor,
    p_seed: tl.tensor,
    p_num_outputs: tl.tensor,
    p_peak: tl.tensor,
    p_logit: tl.tensor,
    p_noise: tl.tensor,
    p_winner: tl.tensor,
    p_mass: tl.tensor,
    p_span_max: tl.tensor,
    V: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_r = tl.program_id(0) // TILES
    i_tile = tl.program_id(0) % TILES
    o_v = i_tile * TILE + tl.arange(0, TILE)
    o_out = i_r * TILES + i_tile
    p_row = p_logits + i_r.to(tl.int64) * V
    b_logits = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
    # NaN must win over everything, so that the row fails.
    b_logits = tl.where(b_logits != b_logits, float("inf"), b_logits)
    peak = tl.max(b_logits, axis=0)
    tl.store(p_peak + o_out, peak)
    if MODE == "greedy":
        tl.store(p_winner + o_out, tl.min(tl.where(b_logits == peak, o_v, V), axis=0))
    else:
        seat = tl.load(p_seats + i_r)
        temperature = tl.load(p_temperature + seat)
        scale = scale_of(temperature)
        is_finite = (peak < float("inf")) & (peak > float("-inf"))
        b_weights = weights_of(b_logits, tl.where(is_finite, peak, 0.0), scale)
        b_weights = tl.where(o_v < V, b_weights, 0.0)
        races = temperature >= 0.0
        if MODE == "filtered":
            tl.store(p_mass + o_out, tl.sum(b_weights, axis=0))
            b_spans = tl.max(tl.reshape(b_logits, (TILE // SPAN, SPAN)), axis=1)
            o_span = o_out * (TILE // SPAN) + tl.arange(0, TILE // SPAN)
            tl.store(p_span_max + o_span, b_spans)
            top_k = tl.load(p_top_k + seat)
            races = (top_k <= 0) | (top_k >= V)
            races = races & (tl.load(p_top_p + seat) >= 1.0) & (tl.load(p_min_p + seat) <= 0.0)
        if races:
            start = row_start(tl.load(p_seed + seat), tl.load(p_num_outputs + seat))
            b_noise = token_noise(start, o_v)
            b_noise = tl.where(temperature > 0.0, b_noise, 1.0)
            b_keys = b_weights / b_noise
            best = tl.max(b_keys, axis=0)
            winner = tl.min(tl.where(b_keys == best, o_v, V), axis=0)
            is_winner = o_v == winner
            tl.store(p_winner + o_out, winner)
            tl.store(p_logit + o_out, tl.sum(tl.where(is_winner, b_logits, 0.0), axis=0))
            tl.store(p_noise + o_out, tl.sum(tl.where(is_winner, b_noise, 0.0), axis=0))


@triton.jit(do_not_specialize=["spare_seat"])
def _token_kernel(
    p_seats: tl.tensor,
    p_temperature: tl.tensor,
    p_num_outputs: tl.tensor,
    p_num_tokens: tl.tensor,
    p_last_token: tl.tensor,
    p_tokens: tl.tensor,
    p_peak: tl.tensor,
    p_logit: tl.tensor,
    p_noise: tl.tensor,
    p_winner: tl.tensor,
    spare_seat: tl.tensor,
    V: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_r = tl.program_id(0)
    seat = tl.load(p_seats + i_r)
    scale = scale_of(tl.load(p_temperature + seat))
    peak, token = combine_tiles(
        p_peak, p_logit, p_noise, p_winner, i_r, scale, V, TILES, BLOCK_TILES, MODE == "greedy"
    )
    write_token(
        p_tokens, p_num_outputs, p_num_tokens, p_last_token, i_r, seat, spare_seat, peak, token
    )


def sample(
    logits_RV: torch.Tensor,
    seats_R: torch.Tensor,
    sampling: SamplingTable,
    tokens_out_R: torch.Tensor,
    scratch: SamplingScratch,
    *,
    mode: Mode,
) -> None:
    """Samples one token a row into the int32 `tokens_out_R` and into the row's seat.

    "greedy" ignores temperatures, "plain" ignores filters, "filtered" obeys all; greedy rows may
    stand among others. A row whose largest logit is NaN or infinite gets token -1 and leaves its
    seat alone, and rows of the spare seat never change it.
    """
    num_rows, vocab_size = logits_RV.shape
    assert logits_RV.is_contiguous() and seats_R.dtype == torch.int32
    assert tokens_out_R.dtype == torch.int32 and len(tokens_out_R) == len(seats_R) == num_rows
    tiles = scratch.peak_RL.shape[1]
    assert tiles == triton.cdiv(vocab_size, TILE) and num_rows <= len(scratch.peak_RL), (
        f"scratch of {tuple(scratch.peak_RL.shape)} tiles for logits {tuple(logits_RV.shape)}"
    )
    if num_rows == 0:
        return
    _tile_kernel[(num_rows * tiles,)](
        logits_RV,
        seats_R,
        sampling.temperature_S,
        sampling.top_k_S,
        sampling.top_p_S,
        sampling.min_p_S,
        sampling.seed_S,
        sampling.num_outputs_S,
        scratch.peak_RL,
        scratch.logit_RL,
        scratch.noise_RL,
        scratch.winner_RL,
        scratch.mass_RL,
        scratch.span_max,
        V=vocab_size,
        TILES=tiles,
        TILE=TILE,
        SPAN=SPAN,
        MODE=mode,
        PDL=dependent_launch.ENABLED,
        num_warps=4,
        **dependent_launch.launch_options(),
    )
    if mode == "filtered":
        launch_filter(logits_RV, seats_R, sampling, tokens_out_R, scratch)
        return
    _token_kernel[(num_rows,)](
        seats_R,
        sampling.temperature_S,
        sampling.num_outputs_S,
        sampling.num_tokens_S,
        sampling.last_token_S,
        tokens_out_R,
        scratch.peak_RL,
        scratch.logit_RL,
        scratch.noise_RL,
        scratch.winner_RL,
        len(sampling.last_token_S) - 1,
        V=vocab_size,
        TILES=tiles,
        BLOCK_TILES=triton.next_power_of_2(tiles),
        MODE=mode,
        PDL=dependent_launch.ENABLED,
        num_warps=1,
        **dependent_launch.launch_options(),
    )
