"""The end of a row's sampling, shared by all modes: the best of the tiles' winners, and its seat.

Owns no kernel, only the parts of them; used by `sampling` and `sampling_filter`.
"""

import triton
import triton.language as tl

from cearx.kernels.sampling_noise import weights_of


@triton.jit
def combine_tiles(
    p_peak: tl.tensor,
    p_logit: tl.tensor,
    p_noise: tl.tensor,
    p_winner: tl.tensor,
    i_r: tl.tensor,
    scale: tl.tensor,
    V: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    IS_GREEDY: tl.constexpr,
):
    """The row's largest logit and the token that wins, of equal ones the lowest."""
    o_tile = tl.arange(0, BLOCK_TILES)
    is_tile = o_tile < TILES
    o_in = i_r * TILES + o_tile
    b_peak = tl.load(p_peak + o_in, mask=is_tile, other=float("-inf"))
    b_winner = tl.load(p_winner + o_in, mask=is_tile, other=V)
    peak = tl.max(b_peak, axis=0)
    if IS_GREEDY:
        b_keys = b_peak
    else:
        b_logit = tl.load(p_logit + o_in, mask=is_tile, other=float("-inf"))
        b_noise = tl.load(p_noise + o_in, mask=is_tile, other=1.0)
        is_finite = (peak < float("inf")) & (peak > float("-inf"))
        b_weights = weights_of(b_logit, tl.where(is_finite, peak, 0.0), scale)
        b_keys = tl.where(is_tile, b_weights / b_noise, -1.0)
    best = tl.max(b_keys, axis=0)
    return peak, tl.min(tl.where(b_keys == best, b_winner, V), axis=0)


@triton.jit
def write_token(
    p_tokens: tl.tensor,
    p_num_outputs: tl.tensor,
    p_num_tokens: tl.tensor,
    p_last_token: tl.tensor,
    i_r: tl.tensor,
    seat: tl.tensor,
    spare_seat: tl.tensor,
    peak: tl.tensor,
    token: tl.tensor,
):
    """Ends a row: the token goes out and into the seat, or -1 goes out."""
    is_sampled = (peak < float("inf")) & (peak > float("-inf"))
    tl.store(p_tokens + i_r, tl.where(is_sampled, token, -1))
    if is_sampled & (seat != spare_seat):
        tl.store(p_last_token + seat, token)
        tl.store(p_num_tokens + seat, tl.load(p_num_tokens + seat) + 1)
        tl.store(p_num_outputs + seat, tl.load(p_num_outputs + seat) + 1)
