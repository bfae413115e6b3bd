"""Random paged attention problems whose unwritten memory is poisoned.

Builds pools, tables and packed queries for the kernels' tests and their benchmark: every slot that
holds no token is NaN, and so are the outputs and the scratch, so that a read of either shows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """The attention shape of a model."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def qkv_size(self) -> int:
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, eq=False)
class Problem:
    """Requests with everything written; `lengths[i]` is what seat `seats[i]` knows."""

    heads: Heads
    kv_B2KPD: Tensor
    block_tables_SM: Tensor
    seats: Tensor
    lengths: Tensor

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5

    def queries(self, num_tokens: int, seed: int) -> Tensor:
        """[T, N, D], a strided view of a packed qkv whose other parts are NaN."""
        heads = self.heads
        pool = self.kv_B2KPD
        qkv_TX = torch.full(
            (num_tokens, heads.qkv_size), torch.nan, dtype=pool.dtype, device=pool.device
        )
        q_TX = qkv_TX[:, : heads.num_q_heads * heads.head_dim]
        generator = torch.Generator(pool.device).manual_seed(seed)
        q_TX.normal_(generator=generator)
        return q_TX.unflatten(1, (heads.num_q_heads, heads.head_dim))


def make_problem(
    heads: Heads,
    lengths: list[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    spare_blocks: int = 3,
) -> Problem:
    """Lengths in rows of shuffled seats, blocks in shuffled order, NaN wherever no token lies.

    Table entries past a length name a block that does not exist.
    """
    shuffle = torch.Generator().manual_seed(seed)
    size = heads.block_size
    needed = [-(-length // size) for length in lengths]
    num_blocks = sum(needed) + spare_blocks
    num_seats = len(lengths) + 2
    order = torch.randperm(num_blocks, generator=shuffle)
    seats = torch.randperm(num_seats, generator=shuffle)[: len(lengths)]
    tables_SM = torch.full((num_seats, max(needed) + 1), 2**31 - 1, dtype=torch.int32)
    written = torch.zeros(num_blocks + 1, size, dtype=torch.bool)
    first = 0
    for seat, length, count in zip(seats.tolist(), lengths, needed, strict=True):
        blocks = order[first : first + count]
        first += count
        tables_SM[seat, :count] = blocks.int()
        held = torch.arange(count * size).view(count, size) < length
        written[blocks] = held
    generator = torch.Generator(device).manual_seed(seed)
    kv = torch.empty(
        num_blocks + 1, 2, heads.num_kv_heads, size, heads.head_dim, dtype=dtype, device=device
    )
    kv.normal_(generator=generator)
    kv.masked_fill_(~written.to(device)[:, None, None, :, None], torch.nan)
    return Problem(
        heads=heads,
        kv_B2KPD=kv,
        block_tables_SM=tables_SM.to(device),
        seats=seats.int().to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the root mean square of what was expected; NaN counts as infinite."""
    error = (actual.float() - expected).abs().max() / expected.square().mean().sqrt()
    return float(error.nan_to_num(nan=torch.inf))


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """A problem whose rows' last tokens have no key yet: their slots are NaN, qkv holds them."""

    problem: Problem
    qkv_RX: Tensor
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    cos_sin_LD: Tensor
    eps: float = 1e-6

    @property
    def slots_R(self) -> Tensor:
        """int64: block * P + offset of the last tokens."""
        problem = self.problem
        size, last_R = problem.heads.block_size, problem.lengths.long() - 1
        blocks_R = problem.block_tables_SM[problem.seats.long(), last_R // size].long()
        return blocks_R * size + last_R % size

    def arguments(self) -> tuple[Tensor | float | None, ...]:
        """Those of `position_and_attend` up to the lengths."""
        problem = self.problem
        tables = (problem.block_tables_SM, problem.seats, problem.lengths)
        norms = (self.q_norm_D, self.k_norm_D, self.eps)
        return (self.qkv_RX, *norms, self.cos_sin_LD, problem.kv_B2KPD, *tables)


def make_decode_rows(problem: Problem, *, with_norm: bool, seed: int) -> DecodeRows:
    """Takes the last token of every row out of the problem's pool."""
    heads, pool = problem.heads, problem.kv_B2KPD
    generator = torch.Generator(pool.device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=pool.device)

    norms = [(draw(heads.head_dim).abs() + 0.5).to(pool.dtype) for _ in range(2)]
    angles = draw(int(problem.lengths.max()), heads.head_dim // 2) * 3
    rows = DecodeRows(
        problem=problem,
        qkv_RX=(draw(len(problem.seats), heads.qkv_size) * 2).to(pool.dtype),
        q_norm_D=norms[0] if with_norm else None,
        k_norm_D=norms[1] if with_norm else None,
        cos_sin_LD=torch.cat((angles.cos(), angles.sin()), dim=-1),
    )
    size, slots_R = heads.block_size, rows.slots_R
    pool[slots_R // size, :, :, slots_R % size] = torch.nan
    return rows
