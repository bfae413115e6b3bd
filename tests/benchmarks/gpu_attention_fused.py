"""The fused attention of decode rows beside the two kernels that it replaces: bits, times, a sweep.

Owns the points and configurations that are tried. Keys and values rotate over more memory than the
second-level cache holds; every launch of a graph has blocks and slots of its own. Run by
`gpu_attention.py`.
"""

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import astuple, replace

import torch
from gpu_attention_times import (
    COLD_BYTES,
    DEVICE,
    DTYPE,
    MODELS,
    PEAK_BYTES,
    POOL_BLOCKS,
    DecodeBench,
    decode_bytes,
    graph_us,
    listing,
    say,
)
from paged_attention import DecodeRows, Heads, make_decode_rows, make_problem
from torch import Tensor

from cearx.kernels import position_and_attend as fused
from cearx.kernels.decode_attention import decode_attention
from cearx.kernels.position_and_attend import AttendConfig
from cearx.kernels.position_and_store import position_and_store
from cearx.kernels.row_splits import count_splits, make_scratch

FUSED_ROWS, FUSED_CONTEXTS = (1, 4, 16, 64), (32, 64, 288, 1024, 4096)
MAX_LAUNCHES = 256
FUSED_TILES = [
    # tokens of a tile, warps, stages, early; registers
    AttendConfig(block_n, warps, stages, 256, early, 264 if early else 384, registers)
    for block_n, warps, stages, early, registers in (
        (64, 4, 1, True, None),
        (64, 4, 1, True, 168),
        (32, 2, 1, True, None),
        (32, 4, 1, True, None),
        (64, 8, 1, True, None),
        (128, 8, 1, True, None),
        (64, 2, 2, False, None),
        (64, 2, 3, False, None),
        (64, 4, 2, False, None),
        (64, 4, 2, False, 128),
        (64, 4, 3, False, 128),
        (32, 2, 3, False, None),
        (128, 8, 2, False, None),
    )
]
FUSED_MIN_SPLITS = (64, 96, 144, 288, 512)
FUSED_PROGRAMS = (132, 264, 384)


def pair_of(rows: DecodeRows, kv_B2KPD: Tensor) -> Tensor:
    """The two kernels' output; writes the pool given."""
    problem = rows.problem
    heads, qkv_RX = problem.heads, rows.qkv_RX.clone()
    position_and_store(
        qkv_RX,
        rows.q_norm_D,
        rows.k_norm_D,
        rows.eps,
        rows.cos_sin_LD,
        problem.lengths.long() - 1,
        rows.slots_R,
        kv_B2KPD,
        num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads,
    )
    q_RND = qkv_RX.unflatten(1, (-1, heads.head_dim))[:, : heads.num_q_heads]
    out_RND = torch.full_like(q_RND, torch.nan)
    tables = (problem.block_tables_SM, problem.seats, problem.lengths)
    scratch = make_scratch(len(problem.seats), heads.num_q_heads, heads.head_dim, DEVICE)
    decode_attention(q_RND, kv_B2KPD, *tables, out_RND, scratch, problem.scale)
    return out_RND


def run_fused(rows: DecodeRows, kv_B2KPD: Tensor, config: AttendConfig | None = None) -> Tensor:
    """Two launches, so that counters which were not put back show; writes the pool given."""
    problem = rows.problem
    heads = problem.heads
    shape = (len(problem.seats), heads.num_q_heads, heads.head_dim)
    out_RND = torch.full(shape, torch.nan, dtype=DTYPE, device=DEVICE)
    scratch = make_scratch(shape[0], heads.num_q_heads, heads.head_dim, DEVICE)
    for tensor in (scratch.partials, scratch.maxima, scratch.sums):
        tensor.fill_(torch.nan)
    qkv_RX, *others = rows.arguments()
    others[4] = kv_B2KPD
    for _ in range(2):
        fused.position_and_attend(qkv_RX, *others, out_RND, scratch, problem.scale, config=config)
    assert not scratch.arrived.any(), "a counter was not put back"
    return out_RND


def fused_rows(heads: Heads, lengths: list[int], with_norm: bool) -> DecodeRows:
    problem = make_problem(heads, lengths, dtype=DTYPE, device=DEVICE, seed=len(lengths))
    return make_decode_rows(problem, with_norm=with_norm, seed=1)


def warm_fused(heads: Heads, config: AttendConfig | None) -> None:
    """Compiles what a part will launch: all checked-in configurations, or the one given."""
    for count in (1, 9, 129) if config is None else (1,):
        for with_norm in (False, True) if config is None else (True,):
            rows = fused_rows(heads, [5] * count, with_norm)
            run_fused(rows, rows.problem.kv_B2KPD, config)


def check_fused(shapes: list[Heads], row_error: Callable[[Tensor, Tensor], float]) -> None:
    """Rows of all lengths in every shape and configuration: errors, and bits of the pool."""
    rng = random.Random(2)
    worst = worst_pair = 0.0
    num_keys = num_different = num_astray = 0
    for heads, with_norm in itertools.product(shapes, (False, True)):
        for count in (1, 5, 40):
            lengths = [rng.choice((1, 2, 64, 65, 257, rng.randint(1, 9000))) for _ in range(count)]
            rows = fused_rows(heads, lengths, with_norm)
            problem, size = rows.problem, heads.block_size
            expected_RND, _ = fused.reference_position_and_attend(*rows.arguments(), problem.scale)
            pair_kv = problem.kv_B2KPD.clone()
            worst_pair = max(worst_pair, row_error(pair_of(rows, pair_kv), expected_RND))
            configs: list[AttendConfig | None] = [None]
            if heads in MODELS.values():
                configs += [replace(c, min_split=96) for c in FUSED_TILES]
            here = (rows.slots_R // size, slice(None), slice(None), rows.slots_R % size)
            for config in configs:
                kv_B2KPD = problem.kv_B2KPD.clone()
                error = row_error(run_fused(rows, kv_B2KPD, config), expected_RND)
                if error > 0.05:
                    say(f"  WRONG {heads} norm {with_norm} {lengths} {config}: {error}", True)
                worst = max(worst, error)
                num_keys += pair_kv[here].numel()
                num_different += int((kv_B2KPD[here] != pair_kv[here]).sum())
                kv_B2KPD[here] = pair_kv[here]
                num_astray += int((kv_B2KPD.view(torch.int16) != pair_kv.view(torch.int16)).sum())
    right = worst < 0.05 and num_astray == 0 and num_different <= num_keys // 1000
    say(
        f"fused {'OK' if right else 'WRONG'}: largest error of a row over its rms {worst:.4f} "
        f"(two kernels {worst_pair:.4f}); {num_different} of {num_keys} values in slots differ "
        f"from the two kernels', {num_astray} elsewhere",
        summary=True,
    )


class FusedBench:
    """One point: tensors of its launches, timed either way."""

    def __init__(self, bench: DecodeBench, heads: Heads, rows: int, context: int) -> None:
        torch.manual_seed(1)
        self.heads, self.kv_B2KPD = heads, bench.kv
        head_dim, size = heads.head_dim, heads.block_size
        blocks = -(-context // size)
        count = min(max(-(-COLD_BYTES // decode_bytes(heads, rows, context)), 8), MAX_LAUNCHES)
        starts = [i * rows * blocks % (POOL_BLOCKS - rows * blocks + 1) for i in range(count)]
        self.tables = [bench.order[s : s + rows * blocks].view(rows, blocks) for s in starts]
        offset = (context - 1) % size
        self.slots = [table[:, -1].long() * size + offset for table in self.tables]
        self.seats_R = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.lengths_R = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        self.positions_R = self.lengths_R.long() - 1
        self.qkv_RX = torch.randn(rows, heads.qkv_size, dtype=DTYPE, device=DEVICE)
        self.norm_D = torch.rand(head_dim, device=DEVICE).to(DTYPE)
        self.cos_sin_LD = torch.rand(context, head_dim, device=DEVICE)
        self.q_RND = self.qkv_RX.unflatten(1, (-1, head_dim))[:, : heads.num_q_heads]
        self.out_RND = torch.empty_like(self.q_RND)
        self.scratch = make_scratch(rows, heads.num_q_heads, head_dim, DEVICE)

    def fused_us(self, config: AttendConfig | None = None) -> float:
        def launch(table_RM: Tensor) -> None:
            fused.position_and_attend(
                self.qkv_RX,
                self.norm_D,
                self.norm_D,
                1e-6,
                self.cos_sin_LD,
                self.kv_B2KPD,
                table_RM,
                self.seats_R,
                self.lengths_R,
                self.out_RND,
                self.scratch,
                self.heads.head_dim**-0.5,
                config=config,
            )

        return graph_us([lambda t=table: launch(t) for table in self.tables], 3)

    def pair_us(self) -> float:
        def launch(table_RM: Tensor, slots_R: Tensor) -> None:
            position_and_store(
                self.qkv_RX,
                self.norm_D,
                self.norm_D,
                1e-6,
                self.cos_sin_LD,
                self.positions_R,
                slots_R,
                self.kv_B2KPD,
                num_q_heads=self.heads.num_q_heads,
                num_kv_heads=self.heads.num_kv_heads,
            )
            decode_attention(
                self.q_RND,
                self.kv_B2KPD,
                table_RM,
                self.seats_R,
                self.lengths_R,
                self.out_RND,
                self.scratch,
                self.heads.head_dim**-0.5,
            )

        pairs = zip(self.tables, self.slots, strict=True)
        return graph_us([lambda t=t, s=s: launch(t, s) for t, s in pairs], 3)


def time_fused(bench: DecodeBench) -> None:
    """Microseconds a layer of two kernels > one, and the share of the memory's rate of the one."""
    for model, heads in MODELS.items():
        for rows in FUSED_ROWS:
            cells = []
            for context in FUSED_CONTEXTS:
                point = FusedBench(bench, heads, rows, context)
                pair, one = point.pair_us(), point.fused_us()
                share = decode_bytes(heads, rows, context) / one * 1e6 / PEAK_BYTES
                cells.append(f"{context}: {pair:.1f} > {one:.1f} {share:.0%}")
            say(f"fused {model} R={rows:2} two > one us | " + " | ".join(cells), summary=True)


def sweep_fused(bench: DecodeBench, bad: set[AttendConfig], end: float) -> None:
    """Tiles first, then splits of the best three; both models have the same keys, so one is run."""
    heads = MODELS["8B"]
    begin = time.monotonic()
    for rows, context in itertools.product(FUSED_ROWS, FUSED_CONTEXTS[1:]):
        if time.monotonic() > end:
            say(f"sweep of fused stopped at R={rows} {context}", summary=True)
            return
        point = FusedBench(bench, heads, rows, context)
        tried = [config for config in FUSED_TILES if config not in bad]
        found = [(point.fused_us(config), astuple(config)) for config in tried]
        found.sort(key=lambda pair: pair[0])
        splits: dict[tuple[object, ...], tuple[float, tuple[object, ...]]] = {}
        for (_, values), min_split, programs in itertools.product(
            found[:3], FUSED_MIN_SPLITS, FUSED_PROGRAMS
        ):
            config = replace(AttendConfig(*values), min_split=min_split, max_programs=programs)
            grid = count_splits(rows, heads.num_kv_heads, programs)
            key = (*values[:3], *values[4:5], values[6], grid)
            key += (min((context - 1) // min_split, grid),)
            if key not in splits:
                splits[key] = (point.fused_us(config), astuple(config))
        best = sorted(splits.values(), key=lambda pair: pair[0])
        say(f"  fused R={rows} {context}: {listing(found[:8])}")
        say(f"    {listing(best[:6])}")
        us, values = best[0]
        say(
            f"best fused R={rows}x{context}: {us:.1f} us {values} default {point.fused_us():.1f}",
            True,
        )
    say(
        f"  (n, warps, stages, min_split, early, programs, registers) in "
        f"{time.monotonic() - begin:.0f} s"
    )
