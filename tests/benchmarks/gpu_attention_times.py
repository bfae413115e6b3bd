"""Times of the attention kernels inside CUDA graphs, and the sweep over how they are compiled.

Owns the points, the configurations that the sweep tries, and the summary. Keys and values rotate
over more memory than the second-level cache holds. Run by `gpu_attention.py`.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple

import torch
from paged_attention import Heads, make_problem
from torch import Tensor

from cearx.kernels import decode_attention as decode
from cearx.kernels import position_and_store as store
from cearx.kernels import prefill_attention as prefill
from cearx.kernels.row_splits import make_scratch

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
PEAK_BYTES = 4.3e12
COLD_BYTES = 256 << 20
"""Launches of one graph read at least this much before they come back to the same blocks."""
POOL_BLOCKS = 16_400
MODELS = {"8B": Heads(32, 8, 128, 64), "0.6B": Heads(16, 8, 128, 64)}
DECODE_ROWS, DECODE_CONTEXTS = (1, 4, 16, 64), (64, 288, 1024, 4096, 8192)
DECODE_TILES = [
    (64, 4, 3),
    (64, 4, 4),
    (64, 2, 2),
    (64, 2, 3),
    (32, 2, 4),
    (32, 1, 3),
    (16, 1, 4),
    (128, 4, 2),
    (128, 4, 3),
    (128, 8, 2),
    (256, 8, 1),
]
MIN_SPLITS = (64, 96, 160, 256, 512)
PREFILL_POINTS = ((1, 32), (16, 256), (64, 256), (1, 4096), (4, 4096))
PREFILL_TILES = [
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 8, 4),
    (128, 32, 8, 4),
    (128, 128, 8, 2),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 32, 4, 3),
    (32, 64, 4, 3),
    (16, 64, 4, 3),
]
STORE_TOKENS = (1, 16, 64, 4096, 16384)
SUMMARY: list[str] = []


def say(line: str, summary: bool = False) -> None:
    print(line, flush=True)
    if summary:
        SUMMARY.append(line)


def graph_us(launches: list[Callable[[], None]], repeats: int = 5) -> float:
    """Microseconds a launch, all launches in one graph, median of some replays."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


class StoreCase:
    """Inputs of position_and_store for `num_tokens` tokens in shuffled slots."""

    def __init__(self, heads: Heads, num_tokens: int, with_norm: bool) -> None:
        torch.manual_seed(num_tokens)
        blocks = -(-num_tokens // heads.block_size) + 2
        self.heads = heads
        self.qkv_TX = torch.randn(num_tokens, heads.qkv_size, dtype=DTYPE, device=DEVICE)
        self.norms = tuple(
            torch.rand(heads.head_dim, device=DEVICE).to(DTYPE) if with_norm else None
            for _ in range(2)
        )
        self.positions_T = torch.randint(9000, (num_tokens,), device=DEVICE)
        self.slots_T = torch.randperm(blocks * heads.block_size, device=DEVICE)[:num_tokens]
        angles = torch.rand(9000, heads.head_dim // 2, device=DEVICE)
        self.cos_sin_LD = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.kv_B2KPD = torch.zeros(
            (blocks + 1, 2, heads.num_kv_heads, heads.block_size, heads.head_dim),
            dtype=DTYPE,
            device=DEVICE,
        )

    def arguments(self) -> tuple[tuple, dict[str, int]]:
        counts = {
            "num_q_heads": self.heads.num_q_heads,
            "num_kv_heads": self.heads.num_kv_heads,
        }
        tensors = (self.cos_sin_LD, self.positions_T, self.slots_T, self.kv_B2KPD)
        return (self.qkv_TX, *self.norms, 1e-6, *tensors), counts

    def launch(self) -> None:
        arguments, counts = self.arguments()
        store.position_and_store(*arguments, **counts)


class DecodeBench:
    """One pool for all points; every launch of a graph has its own blocks."""

    def __init__(self) -> None:
        self.kv = torch.randn(POOL_BLOCKS, 2, 8, 64, 128, dtype=DTYPE, device=DEVICE)
        self.order = torch.randperm(POOL_BLOCKS, device=DEVICE).int()

    def us(
        self, heads: Heads, rows: int, context: int, config: decode.DecodeConfig | None = None
    ) -> float:
        blocks = -(-context // heads.block_size)
        read = decode_bytes(heads, rows, context)
        count = min(max(-(-COLD_BYTES // read), 8), 400)
        seats = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        lengths = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        qkv = torch.randn(rows, heads.qkv_size, dtype=DTYPE, device=DEVICE)
        q = qkv[:, : heads.num_q_heads * 128].unflatten(1, (heads.num_q_heads, 128))
        out = torch.empty(rows, heads.num_q_heads, 128, dtype=DTYPE, device=DEVICE)
        scratch = make_scratch(rows, heads.num_q_heads, 128, DEVICE)
        launches: list[Callable[[], None]] = []
        for launch in range(count):
            start = launch * rows * blocks % (POOL_BLOCKS - rows * blocks + 1)
            table = self.order[start : start + rows * blocks].view(rows, blocks)

            def call(table: Tensor = table) -> None:
                decode.decode_attention(
                    q, self.kv, table, seats, lengths, out, scratch, 128**-0.5, config=config
                )

            launches.append(call)
        return graph_us(launches)


def decode_bytes(heads: Heads, rows: int, context: int) -> int:
    return rows * context * heads.num_kv_heads * heads.head_dim * 4


def time_decode(bench: DecodeBench) -> None:
    for model, heads in MODELS.items():
        for rows in DECODE_ROWS:
            cells = []
            for context in DECODE_CONTEXTS:
                us = bench.us(heads, rows, context)
                rate = decode_bytes(heads, rows, context) / us * 1e6
                cells.append(
                    f"{context}: {us:.1f} us {rate / 1e9:.0f} GB/s {rate / PEAK_BYTES:.0%}"
                )
            say(f"decode {model} R={rows:2} | " + " | ".join(cells), summary=True)


def prefill_us(
    heads: Heads, chunks: int, tokens: int, config: prefill.PrefillConfig | None = None
) -> float:
    problem = make_problem(heads, [tokens] * chunks, dtype=DTYPE, device=DEVICE, seed=1)
    cu_seqlens = torch.arange(chunks + 1, device=DEVICE, dtype=torch.int32) * tokens
    q_TND = problem.queries(chunks * tokens, seed=1)
    out_TND = torch.empty_like(q_TND)

    def launch() -> None:
        prefill.prefill_attention(
            q_TND,
            problem.kv_B2KPD,
            problem.block_tables_SM,
            problem.seats,
            cu_seqlens,
            problem.lengths,
            out_TND,
            tokens,
            problem.scale,
            config=config,
        )

    return graph_us([launch] * (4 if chunks * tokens > 4096 else 20))


def prefill_tflops(heads: Heads, chunks: int, tokens: int, us: float) -> float:
    pairs = chunks * tokens * (tokens + 1) / 2
    return 4 * heads.head_dim * heads.num_q_heads * pairs / us / 1e6


def time_prefill() -> None:
    for model, heads in MODELS.items():
        cells = []
        for chunks, tokens in PREFILL_POINTS:
            us = prefill_us(heads, chunks, tokens)
            rate = prefill_tflops(heads, chunks, tokens, us)
            cells.append(f"{chunks}x{tokens}: {us:.1f} us {rate:.0f} TFLOP/s")
        say(f"prefill {model} | " + " | ".join(cells), summary=True)


def time_store() -> None:
    for model, heads in MODELS.items():
        cells = []
        for num_tokens in STORE_TOKENS:
            cases = [StoreCase(heads, num_tokens, True) for _ in range(2)]
            us = graph_us([case.launch for case in cases] * 10)
            read = heads.num_q_heads * 2 + heads.num_kv_heads * 4
            rate = num_tokens * read * heads.head_dim * 2 / us * 1e6
            cells.append(f"T={num_tokens}: {us:.1f} us {rate / 1e9:.0f} GB/s")
        say(f"store {model} | " + " | ".join(cells), summary=True)


def sweep_decode(bench: DecodeBench, bad: set[tuple[str, tuple[int, ...]]], end: float) -> None:
    points = [(r, c) for r in DECODE_ROWS for c in (64, 288, 1024, 4096)]
    points.append((32, 1024))
    for (model, heads), (rows, context) in itertools.product(MODELS.items(), points):
        if time.monotonic() > end:
            say(f"sweep of decode {model} stopped at R={rows} {context}", summary=True)
            return
        found: list[tuple[float, tuple[int, ...]]] = []
        for tiles in DECODE_TILES:
            if ("decode", tiles) not in bad:
                config = decode.DecodeConfig(*tiles, min_split=256)
                found.append((bench.us(heads, rows, context, config), tiles))
        found.sort()
        splits = []
        for (_, tiles), min_split in itertools.product(found[:3], MIN_SPLITS):
            if min_split <= context * 2 or min_split == MIN_SPLITS[0]:
                config = decode.DecodeConfig(*tiles, min_split)
                splits.append((bench.us(heads, rows, context, config), astuple(config)))
        splits.sort()
        default = bench.us(heads, rows, context)
        say(f"  decode {model} R={rows} {context}: " + listing(found))
        say(f"    (n, warps, stages, min_split, programs) {listing(splits[:8])}")
        best, config_of_best = splits[0]
        listed = ",".join(map(str, config_of_best))
        point = f"{model} {rows}x{context}"
        say(f"best {point}: {best:.1f} us ({listed}) default {default:.1f}", True)


def sweep_prefill(bad: set[tuple[str, tuple[int, ...]]], end: float) -> None:
    for model, heads in MODELS.items():
        for chunks, tokens in PREFILL_POINTS:
            if time.monotonic() > end:
                say(f"sweep of prefill {model} stopped at {chunks}x{tokens}", summary=True)
                return
            found = sorted(
                (prefill_us(heads, chunks, tokens, prefill.PrefillConfig(*tiles)), tiles)
                for tiles in PREFILL_TILES
                if ("prefill", tiles) not in bad
            )
            say(f"  prefill {model} {chunks}x{tokens}: " + listing(found))
            us, tiles = found[0]
            rate = prefill_tflops(heads, chunks, tokens, us)
            point = f"{model} {chunks}x{tokens}"
            say(f"best prefill {point}: {us:.1f} us {rate:.0f} TFLOP/s {tiles}", True)


def listing(found: list[tuple[float, tuple[int, ...]]]) -> str:
    return ", ".join(f"{us:.1f} {tiles}" for us, tiles in found)
