"""The inputs of a decode step from the state of its seats, without the host.

Owns the gather of last tokens, positions, lengths and KV slots; never changes a seat. Called first
in a decode step, so that a captured step needs nothing from the host but its seats. The token that
a seat sampled last has no KV yet: it stands at position num_tokens - 1 and its attention reads
num_tokens positions, its own included.
Legend: R rows, S seats, M blocks that a seat can have.
"""

import torch
import triton
import triton.language as tl

from cearx.kernels import dependent_launch
from cearx.kernels.dependent_launch import let_next_start, wait_for_previous

BLOCK_R = 128


@triton.jit(do_not_specialize=["num_rows"])
def _prepare_decode_kernel(
    p_seats: tl.tensor,
    p_num_tokens: tl.tensor,
    p_last_token: tl.tensor,
    p_block_tables: tl.tensor,
    p_input_ids: tl.tensor,
    p_positions: tl.tensor,
    p_slots: tl.tensor,
    p_seq_lens: tl.tensor,
    num_rows: tl.tensor,
    M: tl.constexpr,
    P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = o_r < num_rows
    b_seat = tl.load(p_seats + o_r, mask=is_row, other=0)
    b_length = tl.load(p_num_tokens + b_seat, mask=is_row, other=1)
    b_token = tl.load(p_last_token + b_seat, mask=is_row, other=0)
    b_position = b_length - 1
    o_entry = b_seat.to(tl.int64) * M + b_position // P
    b_block = tl.load(p_block_tables + o_entry, mask=is_row, other=0)
    tl.store(p_input_ids + o_r, b_token.to(tl.int64), mask=is_row)
    tl.store(p_positions + o_r, b_position.to(tl.int64), mask=is_row)
    tl.store(p_slots + o_r, b_block.to(tl.int64) * P + b_position % P, mask=is_row)
    tl.store(p_seq_lens + o_r, b_length, mask=is_row)


def prepare_decode(
    seats_R: torch.Tensor,
    num_tokens_S: torch.Tensor,
    last_token_S: torch.Tensor,
    block_tables_SM: torch.Tensor,
    *,
    block_size: int,
    input_ids_R: torch.Tensor,
    positions_R: torch.Tensor,
    slots_R: torch.Tensor,
    seq_lens_R: torch.Tensor,
) -> None:
    """Fills the int64 inputs and the int32 `seq_lens_R` of a step over the int32 `seats_R`.

    A row's slot is the index of its token's place in the pool: block * block_size + offset. Every
    seat named must know at least one token, the spare one too.
    """
    num_rows = len(seats_R)
    int32 = (seats_R, num_tokens_S, last_token_S, block_tables_SM, seq_lens_R)
    int64 = (input_ids_R, positions_R, slots_R)
    assert all(t.dtype == torch.int32 for t in int32) and all(t.dtype == torch.int64 for t in int64)
    assert all(len(t) == num_rows for t in (*int64, seq_lens_R)), "outputs need one value a row"
    assert all(t.is_contiguous() for t in (*int32, *int64))
    if num_rows == 0:
        return
    _prepare_decode_kernel[(triton.cdiv(num_rows, BLOCK_R),)](
        seats_R,
        num_tokens_S,
        last_token_S,
        block_tables_SM,
        input_ids_R,
        positions_R,
        slots_R,
        seq_lens_R,
        num_rows,
        M=block_tables_SM.shape[1],
        P=block_size,
        BLOCK_R=BLOCK_R,
        PDL=dependent_launch.ENABLED,
        num_warps=4,
        **dependent_launch.launch_options(),
    )


def prepare_decode_reference(
    seats: list[int],
    num_tokens: list[int],
    last_token: list[int],
    block_tables: list[list[int]],
    block_size: int,
) -> list[tuple[int, int, int, int]]:
    """(input id, position, slot, length) of every row, in plain integers."""
    rows = []
    for seat in seats:
        position = num_tokens[seat] - 1
        block = block_tables[seat][position // block_size]
        slot = block * block_size + position % block_size
        rows.append((last_token[seat], position, slot, num_tokens[seat]))
    return rows
