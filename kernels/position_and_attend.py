"""A decode row's whole attention: norm and rotation of q and k, the write of k and v, the softmax.

    q, k, v = split(qkv of the row); q, k normed and rotated as in `rotary_heads`
    out_n = sum_l softmax_l(scale * q_n . k_l) v_l        l in [0, seq_len), head n's K head n // G

Equals `position_and_store`, then `decode_attention`, with one launch and without a trip through
memory: a row's token stands at seq_len - 1, so that its slot follows from the block table. The G
query heads of a key-value head are rows of one small matrix, the new key is the row behind them.
Heads are halves of D/2, as the rotation pairs them; a score is the sum of two products.

Splits: as in `decode_attention` the grid (K, R, max_splits) depends on the number of rows alone.
The cached tokens [0, seq_len - 1) are tiles of BLOCK_N, dealt out to the row's splits in turn:

    tile    0 1 2 3 4 5 6 | new token
    split   0 1 2 0 1 2 0 | 2

so that a program's first tile does not depend on the length. The last split has the new token: it
writes key and value, and takes them from registers. No program reads that slot.

Latency: with EARLY a program asks for its first tile before it reads qkv, and before it waits for
its predecessor, as cached tokens are older than the step. Called once a layer in a step of decodes
only; allocates nothing, never synchronises.

R rows, S seats, N query heads, K key-value heads, G = N / K, D head_dim, B blocks, P block size,
M blocks of a row, X = (N + 2 K) * D, L positions.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cearx.kernels import dependent_launch
from cearx.kernels.decode_attention import reference_decode_attention
from cearx.kernels.dependent_launch import let_next_start, wait_for_previous
from cearx.kernels.paged_kv import as_computed, as_stored, check_pool, check_tables, check_types
from cearx.kernels.position_and_store import reference_position_and_store
from cearx.kernels.rotary_heads import (
    load_cos_sin,
    load_norm_weights,
    norm_heads,
    rotate_heads,
)
from cearx.kernels.row_splits import (
    MAX_GROUP,
    MAX_PROGRAMS,
    DecodeScratch,
    count_splits,
    softmax_step,
    sum_chunk,
    write_group,
)

MIN_HEAD_DIM = 32
"""A product of halves below 16 features is too narrow for the tensor cores."""
NO_SCORE: tl.constexpr = tl.constexpr(-1e30)
"""Below every score, yet finite: a tile without a key leaves nothing behind."""


@dataclass(frozen=True)
class AttendConfig:
    """How the kernel is compiled and when rows are split."""

    block_n: int
    num_warps: int
    num_stages: int
    """Of the loop over tiles without an early one; an early one's loop holds two tiles."""
    min_split: int
    """Tokens: a row of n cached ones has at most n / min_split splits."""
    early: bool = True
    """Whether the first tile of a program is asked for before it reads qkv."""
    max_programs: int = MAX_PROGRAMS
    max_registers: int | None = None
    """Of a thread; None leaves it to the compiler."""


CONFIGS: dict[int, tuple[tuple[int, AttendConfig], ...]] = {
    # bytes of a key: (up to so many rows * K, configuration), the last for all beyond
    128: (
        (128, AttendConfig(64, 4, 1, min_split=256, max_programs=264)),
        (0, AttendConfig(64, 4, 3, min_split=512, early=False)),
    ),
    256: (
        (32, AttendConfig(64, 4, 3, min_split=64, early=False)),
        (128, AttendConfig(64, 4, 1, min_split=256, max_programs=264)),
        (0, AttendConfig(64, 2, 2, min_split=256, early=False)),
    ),
    512: ((0, AttendConfig(32, 4, 2, min_split=256, early=False)),),
}
"""Those of 256 bytes are the best of a dozen inside Qwen3-8B's step of 1, 4, 16 and 64 rows with
64, 288 and 1024 tokens each (docs/experiments.md); the others are not measured."""


def choose_config(num_rows: int, num_kv_heads: int, key_bytes: int) -> AttendConfig:
    """The checked-in choice for a launch; `key_bytes` is one key's size, D times the type's."""
    choices = CONFIGS[min(max(key_bytes, 128), 512)]
    fitting = (config for limit, config in choices if num_rows * num_kv_heads <= limit)
    return next(fitting, choices[-1][1])


@triton.jit
def _load_blocks(p_table, table_width, first, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of the tile at token `first`: one for all where it is large enough, else one each."""
    if BLOCK_SIZE >= BLOCK_N:
        index = first // BLOCK_SIZE
    else:
        index = (first + tl.arange(0, BLOCK_N)) // BLOCK_SIZE
    return tl.load(p_table + tl.minimum(index, table_width - 1))


@triton.jit
def _load_tile(
    p_k,
    blocks,
    first,
    cached,
    VALUES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Both halves of a tile's keys and its values, zero from token `cached` on."""
    HALF: tl.constexpr = HEAD_DIM // 2
    position = first + tl.arange(0, BLOCK_N)
    o_token = blocks.to(tl.int64) * (2 * VALUES) + position % BLOCK_SIZE * HEAD_DIM
    is_key = (position < cached)[:, None]
    p_low = p_k + o_token[:, None] + tl.arange(0, HALF)[None, :]
    p_value = p_k + VALUES + o_token[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    b_low = tl.load(p_low, mask=is_key, other=0.0)
    b_high = tl.load(p_low + HALF, mask=is_key, other=0.0)
    b_v = tl.load(p_value, mask=is_key, other=0.0)
    return b_low, b_high, b_v


@triton.jit
def _scores(q_low, q_high, k_low, k_high, score_scale):
    k_low = as_computed(k_low, q_low.dtype)
    k_high = as_computed(k_high, q_low.dtype)
    scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
    return tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee") * score_scale


@triton.jit(do_not_specialize=["table_stride", "table_width", "min_split"])
def _position_and_attend_kernel(
    p_qkv,
    p_q_norm,
    p_k_norm,
    p_cos_sin,
    p_kv,
    p_tables,
    p_seats,
    p_lens,
    p_out,
    p_partials,
    p_maxima,
    p_sums,
    p_arrived,
    qkv_stride,
    out_stride,
    table_stride,
    table_width,
    min_split,
    eps,
    score_scale,
    HAS_NORM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_Q_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    HEAD_STRIDE: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    VALUES: tl.constexpr = NUM_KV_HEADS * HEAD_STRIDE
    let_next_start(PDL)
    dtype = p_qkv.dtype.element_ty
    i_head = tl.program_id(0)
    i_row = tl.program_id(1)
    i_split = tl.program_id(2)
    max_splits = tl.num_programs(2)
    seat = tl.load(p_seats + i_row)
    length = tl.load(p_lens + i_row)
    p_k = p_kv + i_head * HEAD_STRIDE
    p_table = p_tables + seat.to(tl.int64) * table_stride
    blocks = _load_blocks(p_table, table_width, i_split * BLOCK_N, BLOCK_SIZE, BLOCK_N)

    cached = tl.maximum(length - 1, 0)
    num_tiles = tl.cdiv(cached, BLOCK_N)
    num_splits = tl.minimum(tl.minimum(cached // min_split, num_tiles), max_splits)
    # As many splits as are needed for the longest share: fewer may do as well.
    share = tl.maximum(tl.cdiv(num_tiles, tl.maximum(num_splits, 1)), 1)
    num_splits = tl.maximum(tl.cdiv(num_tiles, share), 1)
    # Returning without the wait is right: split 0 waits, so that the launch cannot end too soon.
    if i_split >= num_splits:
        return

    stride = num_splits * BLOCK_N
    first = i_split * BLOCK_N
    if EARLY:
        k_low, k_high, b_v = _load_tile(
            p_k, blocks, first, cached, VALUES, HEAD_DIM, BLOCK_SIZE, BLOCK_N
        )
        blocks = _load_blocks(p_table, table_width, first + stride, BLOCK_SIZE, BLOCK_N)
    new_block = tl.load(p_table + tl.minimum(cached // BLOCK_SIZE, table_width - 1))

    o_r = tl.arange(0, ROWS)
    o_f = tl.arange(0, HALF)
    o_d = tl.arange(0, HEAD_DIM)
    o_n = tl.arange(0, BLOCK_N)
    is_query = o_r < GROUP
    has_new = (i_split == num_splits - 1) & (length > 0)
    cos, sin = load_cos_sin(p_cos_sin, cached, dtype, HEAD_DIM)
    if HAS_NORM:
        weight_low, weight_high = load_norm_weights(p_q_norm, p_k_norm, is_query, HEAD_DIM)
    wait_for_previous(PDL)

    p_qkv_row = p_qkv + i_row.to(tl.int64) * qkv_stride
    i_h = tl.where(is_query, i_head * GROUP + o_r, NUM_Q_HEADS + i_head)
    exists = (o_r <= GROUP)[:, None] & (o_f >= 0)[None, :]
    p_low = p_qkv_row + i_h[:, None] * HEAD_DIM + o_f[None, :]
    low = tl.load(p_low, mask=exists, other=0.0).to(tl.float32)
    high = tl.load(p_low + HALF, mask=exists, other=0.0).to(tl.float32)
    i_value = NUM_Q_HEADS + NUM_KV_HEADS + i_head
    is_new_v = has_new & (o_d >= 0)
    new_v = tl.load(p_qkv_row + i_value * HEAD_DIM + o_d, mask=is_new_v, other=0.0)
    if HAS_NORM:
        low, high = norm_heads(low, high, weight_low, weight_high, eps, dtype)
    q_low, q_high = rotate_heads(low, high, cos, sin, dtype)

    is_key = has_new & (o_r == GROUP)
    o_slot = new_block.to(tl.int64) * (2 * VALUES) + cached % BLOCK_SIZE * HEAD_DIM
    p_slot = p_k + o_slot + o_r[:, None] * 0
    is_half = is_key[:, None] & (o_f >= 0)[None, :]
    new_low = as_stored(q_low, p_kv.dtype.element_ty)
    new_high = as_stored(q_high, p_kv.dtype.element_ty)
    new_v = as_stored(new_v, p_kv.dtype.element_ty)
    tl.store(p_slot + o_f[None, :], new_low, mask=is_half)
    tl.store(p_slot + HALF + o_f[None, :], new_high, mask=is_half)
    tl.store(p_k + VALUES + o_slot + o_d, new_v, mask=is_new_v)

    # The new key is a row of the queries' tile: one column of that tile's product with itself, as
    # the pool holds it.
    new_scores = _scores(q_low, q_high, new_low, new_high, score_scale)
    b_max = tl.max(tl.where(is_key[None, :], new_scores, NO_SCORE), 1)
    b_sum = tl.where(has_new & (o_r >= 0), 1.0, 0.0)
    b_acc = tl.zeros([ROWS, HEAD_DIM], tl.float32) + new_v.to(tl.float32)[None, :]
    # The blocks of a tile are loaded while the tile before it is computed.
    if EARLY:
        for tile in tl.range(first, cached, stride, num_stages=1):
            next_low, next_high, next_v = _load_tile(
                p_k, blocks, tile + stride, cached, VALUES, HEAD_DIM, BLOCK_SIZE, BLOCK_N
            )
            blocks = _load_blocks(p_table, table_width, tile + 2 * stride, BLOCK_SIZE, BLOCK_N)
            scores = _scores(q_low, q_high, k_low, k_high, score_scale)
            scores = tl.where((tile + o_n < cached)[None, :], scores, float("-inf"))
            b_v = as_computed(b_v, dtype)
            b_max, b_sum, b_acc = softmax_step(scores, b_v, b_max, b_sum, b_acc)
            k_low, k_high, b_v = next_low, next_high, next_v
    else:
        for tile in tl.range(first, cached, stride):
            k_low, k_high, b_v = _load_tile(
                p_k, blocks, tile, cached, VALUES, HEAD_DIM, BLOCK_SIZE, BLOCK_N
            )
            blocks = _load_blocks(p_table, table_width, tile + stride, BLOCK_SIZE, BLOCK_N)
            scores = _scores(q_low, q_high, k_low, k_high, score_scale)
            scores = tl.where((tile + o_n < cached)[None, :], scores, float("-inf"))
            b_v = as_computed(b_v, dtype)
            b_max, b_sum, b_acc = softmax_step(scores, b_v, b_max, b_sum, b_acc)

    write_group(
        p_out + i_row.to(tl.int64) * out_stride + i_head * GROUP * HEAD_DIM,
        b_max,
        b_sum,
        b_acc,
        p_partials,
        p_maxima,
        p_sums,
        p_arrived,
        i_row * NUM_KV_HEADS + i_head,
        i_split,
        num_splits,
        max_splits,
        ROWS,
        GROUP,
        GROUP_PADDED,
        HEAD_DIM,
        CHUNK,
    )


def position_and_attend(
    qkv_RX: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    cos_sin_LD: Tensor,
    kv_B2KPD: Tensor,
    block_tables_SM: Tensor,
    seats_R: Tensor,
    seq_lens_R: Tensor,
    out_RND: Tensor,
    scratch: DecodeScratch,
    scale: float,
    *,
    config: AttendConfig | None = None,
) -> None:
    """Writes every row's key and value to the slot of its last token, and its attention to `out`.

    qkv is as its product left it, and stays so. `cos_sin_LD` is float32, cos of the D/2 pairs, then
    sin. Seats, lengths and tables are int32; lengths count the new token, and a row of length 0
    writes no key and gives zeros. All else but the pool shares the model's type; out may be a
    strided view whose heads are contiguous. `config` is for tuning only.
    """
    num_kv_heads, block_size, head_dim = check_pool(kv_B2KPD)
    num_rows, num_q_heads, _ = out_RND.shape
    check_tables(block_tables_SM, seats_R, seq_lens_R)
    assert head_dim >= MIN_HEAD_DIM, f"head_dim {head_dim} is below {MIN_HEAD_DIM}"
    assert out_RND.shape == (seats_R.shape[0], num_q_heads, head_dim), f"{out_RND.shape}"
    assert out_RND.stride()[1:] == (head_dim, 1), "heads must be contiguous"
    assert qkv_RX.shape == (num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim), qkv_RX.shape
    assert qkv_RX.stride(1) == 1, "a row's features must be contiguous"
    check_types(kv_B2KPD, qkv_RX, out_RND)
    assert (q_norm_D is None) == (k_norm_D is None), "a norm of q or k alone"
    assert cos_sin_LD.dtype == torch.float32 and cos_sin_LD.is_contiguous()
    assert cos_sin_LD.shape[1] == head_dim, f"{cos_sin_LD.shape} for head_dim {head_dim}"
    group = num_q_heads // num_kv_heads
    assert num_q_heads == group * num_kv_heads and group <= MAX_GROUP, (num_q_heads, num_kv_heads)
    if num_rows == 0:
        return
    config = config or choose_config(num_rows, num_kv_heads, head_dim * qkv_RX.element_size())
    max_splits = count_splits(num_rows, num_kv_heads, config.max_programs)
    scratch.check(num_rows, num_q_heads, num_kv_heads, max_splits)
    group_padded = triton.next_power_of_2(group)
    _position_and_attend_kernel[(num_kv_heads, num_rows, max_splits)](
        qkv_RX,
        q_norm_D,
        k_norm_D,
        cos_sin_LD,
        kv_B2KPD,
        block_tables_SM,
        seats_R,
        seq_lens_R,
        out_RND,
        scratch.partials,
        scratch.maxima,
        scratch.sums,
        scratch.arrived,
        qkv_RX.stride(0),
        out_RND.stride(0),
        block_tables_SM.stride(0),
        block_tables_SM.shape[1],
        config.min_split,
        eps,
        scale * math.log2(math.e),
        HAS_NORM=q_norm_D is not None,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=group_padded,
        ROWS=max(triton.next_power_of_2(group + 1), 16),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n,
        CHUNK=sum_chunk(config.num_warps, group_padded),
        EARLY=config.early,
        PDL=dependent_launch.ENABLED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        **dependent_launch.launch_options(),
    )


def reference_position_and_attend(
    qkv_RX: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    cos_sin_LD: Tensor,
    kv_B2KPD: Tensor,
    block_tables_SM: Tensor,
    seats_R: Tensor,
    seq_lens_R: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out_RND, kv_B2KPD) afterwards, float32 without any rounding; changes nothing."""
    num_kv_heads, block_size, head_dim = check_pool(kv_B2KPD)
    num_q_heads = qkv_RX.shape[1] // head_dim - 2 * num_kv_heads
    has_token_R = seq_lens_R > 0
    positions_R = (seq_lens_R.long() - 1)[has_token_R]
    blocks_R = block_tables_SM[seats_R.long()[has_token_R], positions_R // block_size].long()
    qkv_RX = qkv_RX.float()
    turned_RX, kv_B2KPD = reference_position_and_store(
        qkv_RX[has_token_R],
        q_norm_D,
        k_norm_D,
        eps,
        cos_sin_LD,
        positions_R,
        blocks_R * block_size + positions_R % block_size,
        kv_B2KPD,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
    )
    turned_RX = qkv_RX.index_put((has_token_R,), turned_RX)
    q_RND = turned_RX[:, : num_q_heads * head_dim].unflatten(1, (num_q_heads, head_dim))
    tables = (block_tables_SM, seats_R, seq_lens_R)
    return reference_decode_attention(q_RND, kv_B2KPD, *tables, scale), kv_B2KPD
