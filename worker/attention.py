"""Paged attention in torch for steps that mix decodes and prefill chunks.

Owns `AttentionMetadata`, the description of a step that every model's forward receives, and the
computation over it. Never allocates blocks and keeps nothing between steps. The loop builds the
metadata, a model calls `plan_attention` once a step and `paged_attention` once a layer.

T tokens of the step, R rows (requests) of the step, C rows of a group, L keys, S slots,
N query heads, K key-value heads, G = N / K, H = 2 * K, D head_dim, M blocks of the longest row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

GROUP_BYTES = 8 * 1024 * 1024
"""Gathered KV of one decode group: bounds the copy, and is large enough that waking threads for
each group costs little."""
MAX_PADDING = 1.25
"""Padded keys of a decode group may exceed the real ones by this factor."""
MASKED_QUERIES = 256
"""Queries of a chunk that are masked at once; bounds the mask to this many rows."""


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Which tokens of a step belong to which request and where their keys and values lie.

    ```
    rows    | decodes, one token each | prefill chunks, one or more tokens each, any start |
            0                         num_decodes                                          R
    tokens  row r owns [cu_seqlens_q[r], cu_seqlens_q[r + 1]), its last query is token
            seq_lens[r] - 1 of the request
    ```
    All tensors are on the model's device; indices are int64.
    """

    num_decodes: int
    cu_seqlens_q: Tensor
    """[R + 1], from 0 to T."""
    seq_lens: Tensor
    """[R]: tokens of the request whose keys exist after this step, this step's included."""
    block_tables: Tensor
    """[R, M]: block ids of row r in order; entries past its length are never looked at."""
    slot_mapping: Tensor
    """[T]: block * block_size + offset where the token's key and value are written."""


@dataclass(frozen=True, eq=False)
class _Keys:
    """Where the keys of one or several rows lie: a run of slots, or slots to gather."""

    num_rows: int
    length: int
    """Keys of each row, padded to the longest."""
    first_slot: int | None
    """Set when the slots are consecutive."""
    slots: Tensor
    """[num_rows * length]; padding repeats the row's last key."""

    def read(self, kv_SHD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each [C, K, L, D]; views where the slots are consecutive."""
        num_heads, head_dim = kv_SHD.shape[1:]
        if self.first_slot is not None:
            kv = kv_SHD[self.first_slot : self.first_slot + self.length]
        else:
            kv = kv_SHD.view(kv_SHD.shape[0], -1).index_select(0, self.slots)
        kv_CHLD = kv.view(self.num_rows, self.length, num_heads, head_dim).transpose(1, 2)
        k_CKLD, v_CKLD = kv_CHLD.chunk(2, dim=1)
        return k_CKLD, v_CKLD


@dataclass(frozen=True, eq=False)
class _DecodeGroup:
    """Decode rows of similar length that are computed together."""

    first_row: int
    """In the order of `AttentionPlan.decode_order`."""
    keys: _Keys
    mask_C11L: Tensor | None
    """Added to the scores: -inf at padding; None when all lengths are equal."""


@dataclass(frozen=True, eq=False)
class _QueryRun:
    """Consecutive queries of one prefill chunk."""

    first_token: int
    num_tokens: int
    keys: _Keys
    mask_QL: Tensor | None
    """Added to the scores; None when the run starts the request, so that it is plainly causal."""


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What all layers of one step share."""

    num_decodes: int
    decode_order: Tensor | None
    """[num_decodes]: rows by length; None keeps the order of the step."""
    decode_groups: tuple[_DecodeGroup, ...]
    query_runs: tuple[_QueryRun, ...]
    slot_mapping: Tensor


def plan_attention(
    metadata: AttentionMetadata, block_size: int, token_bytes: int, dtype: torch.dtype
) -> AttentionPlan:
    """Groups decodes and cuts chunks; `token_bytes` is one token's keys and values in a layer."""
    seq_lens: list[int] = metadata.seq_lens.tolist()
    starts: list[int] = metadata.cu_seqlens_q.tolist()
    lengths = seq_lens[: metadata.num_decodes]
    groups = _group_by_length(lengths, max_keys=GROUP_BYTES // token_bytes)
    single = len(groups) <= 1
    order = list(range(len(lengths))) if single else [row for group in groups for row in group]
    decode_groups: list[_DecodeGroup] = []
    first_row = 0
    for group in groups:
        rows = sorted(group) if single else group
        keys = _keys_of_rows(metadata, rows, [lengths[row] for row in rows], block_size)
        mask = _padding_mask([lengths[row] for row in rows], keys.length, dtype)
        decode_groups.append(_DecodeGroup(first_row, keys, mask))
        first_row += len(rows)
    query_runs: list[_QueryRun] = []
    for row in range(metadata.num_decodes, len(seq_lens)):
        query_runs += _cut_chunk(
            metadata, row, starts[row], starts[row + 1], seq_lens[row], block_size, dtype
        )
    return AttentionPlan(
        num_decodes=len(lengths),
        decode_order=None if single else torch.tensor(order),
        decode_groups=tuple(decode_groups),
        query_runs=tuple(query_runs),
        slot_mapping=metadata.slot_mapping,
    )


def paged_attention(
    q_TND: Tensor, kv_new_THD: Tensor, kv_SHD: Tensor, plan: AttentionPlan
) -> Tensor:
    """Writes the step's keys and values, then attends; returns [T, N, D] in q's dtype.

    `kv_new_THD` holds the step's keys, then its values; `kv_SHD` is a layer of the KV cache.
    """
    kv_SHD.index_copy_(0, plan.slot_mapping, kv_new_THD)
    if not plan.query_runs and plan.decode_order is None:
        return _attend_group(q_TND, kv_SHD, plan.decode_groups[0])
    out_TND = torch.empty_like(q_TND)
    if plan.decode_groups:
        _attend_decodes(q_TND, kv_SHD, plan, out_TND)
    for run in plan.query_runs:
        tokens = slice(run.first_token, run.first_token + run.num_tokens)
        k_1KLD, v_1KLD = run.keys.read(kv_SHD)
        out_1NQD = scaled_dot_product_attention(
            q_TND[tokens].transpose(0, 1)[None],
            k_1KLD,
            v_1KLD,
            attn_mask=run.mask_QL,
            is_causal=run.mask_QL is None,
            enable_gqa=True,
        )
        out_TND[tokens] = out_1NQD[0].transpose(0, 1)
    return out_TND


def _attend_decodes(q_TND: Tensor, kv_SHD: Tensor, plan: AttentionPlan, out_TND: Tensor) -> None:
    if plan.decode_order is None:
        group = plan.decode_groups[0]
        out_TND[: plan.num_decodes] = _attend_group(q_TND[: plan.num_decodes], kv_SHD, group)
        return
    q_RND = q_TND[plan.decode_order]
    out_RND = torch.empty_like(q_RND)
    for group in plan.decode_groups:
        rows = slice(group.first_row, group.first_row + group.keys.num_rows)
        out_RND[rows] = _attend_group(q_RND[rows], kv_SHD, group)
    out_TND.index_copy_(0, plan.decode_order, out_RND)


def _attend_group(q_CND: Tensor, kv_SHD: Tensor, group: _DecodeGroup) -> Tensor:
    """The query heads that share a key-value head become the rows of one small matrix product."""
    num_rows, num_heads, head_dim = q_CND.shape
    k_CKLD, v_CKLD = group.keys.read(kv_SHD)
    q_CKGD = q_CND.view(num_rows, k_CKLD.shape[1], -1, head_dim)
    out_CKGD = scaled_dot_product_attention(q_CKGD, k_CKLD, v_CKLD, attn_mask=group.mask_C11L)
    return out_CKGD.reshape(num_rows, num_heads, head_dim)


def _group_by_length(lengths: list[int], max_keys: int) -> list[list[int]]:
    """Rows in groups of similar length, each gathering at most `max_keys` keys (or one row)."""
    groups: list[list[int]] = []
    real_keys = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[row]
        padded = (len(groups[-1]) + 1) * length if groups else 0
        if not groups or padded > max_keys or padded > MAX_PADDING * (real_keys + length):
            groups.append([])
            real_keys = 0
        groups[-1].append(row)
        real_keys += length
    return groups


def _keys_of_rows(
    metadata: AttentionMetadata, rows: list[int], lengths: list[int], block_size: int
) -> _Keys:
    """Slots of the rows' keys, each row padded with its own last key: only live slots are read."""
    length = max(lengths)
    position_L = torch.arange(length)
    if min(lengths) == length:
        position_CL = position_L.expand(len(rows), length)
    else:
        position_CL = torch.minimum(position_L, torch.tensor(lengths)[:, None] - 1)
    block_CL = metadata.block_tables[rows].gather(1, position_CL // block_size)
    slots = (block_CL * block_size + position_CL % block_size).flatten()
    first_slot = None
    if len(rows) == 1 and bool((slots[1:] - slots[:-1] == 1).all()):
        first_slot = int(slots[0])
    return _Keys(len(rows), length, first_slot, slots)


def _padding_mask(lengths: list[int], length: int, dtype: torch.dtype) -> Tensor | None:
    if min(lengths) == length:
        return None
    padding_CL = torch.arange(length) >= torch.tensor(lengths)[:, None]
    mask_CL = torch.zeros(padding_CL.shape, dtype=dtype).masked_fill_(padding_CL, -torch.inf)
    return mask_CL[:, None, None, :]


def _cut_chunk(
    metadata: AttentionMetadata,
    row: int,
    first_token: int,
    end_token: int,
    seq_len: int,
    block_size: int,
    dtype: torch.dtype,
) -> list[_QueryRun]:
    """One causal run when the chunk starts the request, else masked runs of MASKED_QUERIES."""
    num_tokens = end_token - first_token
    start = seq_len - num_tokens
    keys = _keys_of_rows(metadata, [row], [seq_len], block_size)
    if start == 0:
        return [_QueryRun(first_token, num_tokens, keys, None)]
    runs: list[_QueryRun] = []
    for offset in range(0, num_tokens, MASKED_QUERIES):
        queries = min(MASKED_QUERIES, num_tokens - offset)
        visible = start + offset + queries
        mask_QL = torch.full((queries, visible), -torch.inf, dtype=dtype)
        mask_QL.triu_(diagonal=start + offset + 1)
        run_keys = _Keys(1, visible, keys.first_slot, keys.slots[:visible])
        runs.append(_QueryRun(first_token + offset, queries, run_keys, mask_QL))
    return runs
