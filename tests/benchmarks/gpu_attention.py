"""The attention kernels on one GPU: correctness in bfloat16, times inside CUDA graphs, a sweep.

Owns a measurement, not a test; the times are `gpu_attention_times.py`. Kernels are compiled by
several processes first. A part that finds the time spent is left out and says so; the summary
always comes last.

    python tests/benchmarks/gpu_attention.py --budget-s 140 --parts correct time chain sweep
    python tests/benchmarks/gpu_attention.py --budget-s 100 --parts fused fused-sweep
"""

import argparse
import itertools
import random
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

sys.path.extend((str(Path(__file__).parent), str(Path(__file__).parent.parent / "support")))
from gpu_attention_chain import ROWS as CHAIN_ROWS
from gpu_attention_chain import Chain, time_chain
from gpu_attention_fused import FUSED_TILES, check_fused, sweep_fused, time_fused, warm_fused
from gpu_attention_times import (
    DECODE_TILES,
    DEVICE,
    DTYPE,
    MODELS,
    PREFILL_TILES,
    SUMMARY,
    DecodeBench,
    StoreCase,
    say,
    sweep_decode,
    sweep_prefill,
    time_decode,
    time_prefill,
    time_store,
)
from paged_attention import Heads, Problem, make_problem

from cearx.kernels import decode_attention as decode
from cearx.kernels import dependent_launch
from cearx.kernels import position_and_store as store
from cearx.kernels import prefill_attention as prefill
from cearx.kernels.row_splits import make_scratch

ODD_HEADS = [
    Heads(8, 8, 64, 16),
    Heads(8, 8, 128, 64),
    Heads(4, 2, 128, 128),
    Heads(16, 8, 64, 64),
    Heads(9, 3, 64, 16),
    Heads(9, 3, 128, 64),
    Heads(32, 8, 128, 16),
    Heads(32, 8, 128, 64),
    Heads(32, 8, 128, 128),
    Heads(28, 4, 128, 64),
    Heads(14, 2, 64, 16),
    Heads(64, 8, 128, 128),
    Heads(32, 4, 64, 64),
]
FUSED_SHAPES = [
    Heads(8, 8, 128, 64),
    Heads(9, 3, 64, 16),
    Heads(28, 4, 128, 64),
    Heads(14, 2, 64, 16),
    Heads(64, 8, 128, 128),
    Heads(4, 2, 128, 256),
    *MODELS.values(),
]


def row_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference within a row over that row's root mean square."""
    difference = (actual.float() - expected).flatten(1).abs().amax(1)
    error = (difference / expected.flatten(1).square().mean(1).sqrt()).max()
    return float(error.nan_to_num(nan=torch.inf))


def run_decode(problem: Problem, config: decode.DecodeConfig | None = None) -> Tensor:
    heads, rows = problem.heads, problem.seats.shape[0]
    q_RND = problem.queries(rows, seed=1)
    out_RND = torch.full(q_RND.shape, torch.nan, dtype=DTYPE, device=DEVICE)
    scratch = make_scratch(rows, heads.num_q_heads, heads.head_dim, DEVICE)
    for tensor in (scratch.partials, scratch.maxima, scratch.sums):
        tensor.fill_(torch.nan)
    tensors = (q_RND, problem.kv_B2KPD, problem.block_tables_SM, problem.seats, problem.lengths)
    for _ in range(2):
        out_RND.fill_(torch.nan)
        decode.decode_attention(*tensors, out_RND, scratch, problem.scale, config=config)
    assert not scratch.arrived.any(), "a counter was not put back"
    return out_RND


def run_prefill(
    problem: Problem, chunks: list[int], config: prefill.PrefillConfig | None = None
) -> tuple[Tensor, Tensor]:
    """(output, cu_seqlens)."""
    cu_seqlens = torch.tensor([0, *chunks]).cumsum(0).to(DEVICE, torch.int32)
    q_TND = problem.queries(sum(chunks), seed=1)
    out_TND = torch.full(q_TND.shape, torch.nan, dtype=DTYPE, device=DEVICE)
    prefill.prefill_attention(
        q_TND,
        problem.kv_B2KPD,
        problem.block_tables_SM,
        problem.seats,
        cu_seqlens,
        problem.lengths,
        out_TND,
        max(chunks),
        problem.scale,
        config=config,
    )
    return out_TND, cu_seqlens


def run_job(kind: str, heads: Heads, tiles: tuple[int, ...] | None) -> None:
    """Runs tiny problems that meet every variant of a kernel which the parts will launch."""
    if kind == "store":
        for num_tokens, with_norm in itertools.product((1, store.FEW_TOKENS + 1), (False, True)):
            StoreCase(heads, num_tokens, with_norm).launch()
    elif kind == "fused":
        warm_fused(heads, FUSED_TILES[tiles[0]] if tiles else None)
    elif kind == "chain":
        for rows in CHAIN_ROWS:
            Chain(DecodeBench(), heads, rows, heads.block_size).run(True)
    elif kind == "decode" and tiles is None:
        for rows in (1, 9, 129):
            run_decode(make_problem(heads, [5] * rows, dtype=DTYPE, device=DEVICE, seed=0))
    elif kind == "decode":
        problem = make_problem(heads, [5], dtype=DTYPE, device=DEVICE, seed=0)
        run_decode(problem, decode.DecodeConfig(*tiles, 256))
    else:
        config = prefill.PrefillConfig(*tiles) if tiles else None
        longest = prefill.FEW_TOKENS + 1
        problem = make_problem(heads, [longest], dtype=DTYPE, device=DEVICE, seed=0)
        for chunk in (1, longest) if tiles is None else (1,):
            run_prefill(problem, [chunk], config)
    torch.cuda.synchronize()


def compile_jobs(jobs: list[tuple[str, Heads, tuple[int, ...] | None]]) -> list[str]:
    """Fills Triton's cache on disk; returns failures."""
    failures = []
    for kind, heads, tiles in jobs:
        try:
            run_job(kind, heads, tiles)
        except Exception as error:
            failures.append(f"{kind} {heads} {tiles}: {type(error).__name__} {error}"[:300])
        finally:
            dependent_launch.ENABLED = False
    return failures


def precompile(parts: list[str], processes: int) -> set[tuple[str, tuple[int, ...]]]:
    """Returns the (kind, tiles) that do not compile or run."""
    jobs: list[tuple[str, Heads, tuple[int, ...] | None]] = []
    kinds: tuple[str, ...] = ("decode", "prefill", "store")
    if all(part.startswith("fused") for part in parts):
        kinds = ("decode", "store")
    if "fused" in parts:
        jobs += [(kind, heads, None) for heads in FUSED_SHAPES for kind in ("fused", *kinds)]
    if {"fused", "fused-sweep"}.intersection(parts):
        numbers = range(len(FUSED_TILES))
        jobs += [("fused", heads, (n,)) for n in numbers for heads in MODELS.values()]
    if "correct" in parts:
        jobs += [(kind, heads, None) for heads in ODD_HEADS for kind in kinds]
    jobs += [(kind, heads, None) for heads in MODELS.values() for kind in kinds]
    if "chain" in parts:
        jobs += [("chain", heads, None) for heads in MODELS.values()]
    if "sweep" in parts:
        jobs += [("decode", heads, t) for heads in MODELS.values() for t in DECODE_TILES]
        jobs += [("prefill", MODELS["8B"], t) for t in PREFILL_TILES]
        jobs += [("prefill", MODELS["0.6B"], t) for t in PREFILL_TILES]
    begin = time.monotonic()
    bad = set()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        shares = [[job] for job in jobs]
        for share, failures in zip(shares, pool.map(compile_jobs, shares), strict=True):
            for failure in failures:
                say(f"FAILED to compile or run: {failure}", summary=True)
                bad.add((share[0][0], share[0][2] or ()))
    say(f"compiled {len(jobs)} jobs in {time.monotonic() - begin:.0f} s")
    return bad


def check_heads(heads: Heads, rng: random.Random) -> tuple[float, float, float]:
    """The largest row errors of decode, prefill and store for one shape of heads."""
    decode_error = prefill_error = store_error = 0.0
    for rows in (1, 5, 40):
        lengths = [rng.choice((1, 2, 15, 64, 255, 512, rng.randint(1, 9000))) for _ in range(rows)]
        lengths[0] = rng.randint(1, 9000)
        problem = make_problem(heads, lengths, dtype=DTYPE, device=DEVICE, seed=rows)
        tensors = (problem.kv_B2KPD, problem.block_tables_SM, problem.seats, problem.lengths)
        expected = decode.reference_decode_attention(
            problem.queries(rows, seed=1), *tensors, problem.scale
        )
        decode_error = max(decode_error, row_error(run_decode(problem), expected))
    for lengths, chunks in (
        ([7], [7]),
        ([33, 20, 1, 9, 70], [33, 0, 1, 9, 2]),
        ([1500, 3000, 257, 64], [1500, 700, 257, 64]),
    ):
        problem = make_problem(heads, lengths, dtype=DTYPE, device=DEVICE, seed=5)
        out_TND, cu_seqlens = run_prefill(problem, chunks)
        expected = prefill.reference_prefill_attention(
            problem.queries(sum(chunks), seed=1),
            problem.kv_B2KPD,
            problem.block_tables_SM,
            problem.seats,
            cu_seqlens,
            problem.lengths,
            problem.scale,
        )
        prefill_error = max(prefill_error, row_error(out_TND, expected))
    for num_tokens, with_norm in itertools.product((1, 77, 1500), (False, True)):
        case = StoreCase(heads, num_tokens, with_norm)
        arguments, counts = case.arguments()
        expected_TX, expected_kv = store.reference_position_and_store(*arguments, **counts)
        case.launch()
        difference = (case.kv_B2KPD.float() - expected_kv).abs().max()
        difference = torch.maximum(difference, (case.qkv_TX.float() - expected_TX).abs().max())
        store_error = max(store_error, float(difference.nan_to_num(nan=torch.inf)))
    return decode_error, prefill_error, store_error


def check_graph_replays(rng: random.Random) -> tuple[float, float]:
    """One capture of each kernel, replayed over new lengths, tables and chunks."""
    heads, rows, blocks = MODELS["8B"], 6, 145
    num_blocks = rows * blocks
    kv = torch.randn(num_blocks + 1, 2, 8, 64, 128, dtype=DTYPE, device=DEVICE)
    tables = torch.zeros(rows + 1, blocks, dtype=torch.int32, device=DEVICE)
    seats = torch.randperm(rows, device=DEVICE).int()
    lengths = torch.ones(rows, dtype=torch.int32, device=DEVICE)
    cu_seqlens = torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE)
    q_TND = torch.randn(512, 32, 128, dtype=DTYPE, device=DEVICE)
    out_RND, out_TND = torch.empty_like(q_TND[:rows]), torch.empty_like(q_TND)
    scratch = make_scratch(rows, 32, 128, DEVICE)
    scale = heads.head_dim**-0.5
    pool = (kv, tables, seats)

    def launch() -> None:
        decode.decode_attention(q_TND[:rows], *pool, lengths, out_RND, scratch, scale)
        prefill.prefill_attention(q_TND, *pool, cu_seqlens, lengths, out_TND, 400, scale)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    decode_error = prefill_error = 0.0
    for _ in range(8):
        new_lengths = [rng.choice((1, 40, 700, 9000, rng.randint(1, 9000))) for _ in range(rows)]
        chunks = [min(rng.choice((0, 1, 17, 400)), n) for n in new_lengths]
        while sum(chunks) > 512:
            chunks[chunks.index(max(chunks))] = 0
        lengths.copy_(torch.tensor(new_lengths))
        cu_seqlens.copy_(torch.tensor([0, *chunks]).cumsum(0))
        tables[:rows] = torch.randperm(num_blocks, device=DEVICE).view(rows, blocks).int()
        q_TND.normal_()
        out_RND.fill_(torch.nan)
        out_TND.fill_(torch.nan)
        graph.replay()
        expected = decode.reference_decode_attention(q_TND[:rows], *pool, lengths, scale)
        decode_error = max(decode_error, row_error(out_RND, expected))
        expected = prefill.reference_prefill_attention(q_TND, *pool, cu_seqlens, lengths, scale)
        total = sum(chunks)
        if total:
            error = row_error(out_TND[:total], expected[:total])
            prefill_error = max(prefill_error, error)
    assert not scratch.arrived.any(), "a counter was not put back"
    return decode_error, prefill_error


def check_correctness() -> None:
    rng = random.Random(1)
    worst = [0.0, 0.0, 0.0]
    for heads in ODD_HEADS:
        errors = check_heads(heads, rng)
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
        say(f"{heads}: decode {errors[0]:.4f} prefill {errors[1]:.4f} store {errors[2]:.4f}")
    verdict = "OK" if worst[0] < 0.05 and worst[1] < 0.05 and worst[2] < 0.1 else "WRONG"
    say(
        f"correct {verdict}: {len(ODD_HEADS)} shapes, largest error of a row over its rms: "
        f"decode {worst[0]:.4f}, prefill {worst[1]:.4f}; store {worst[2]:.4f} absolute",
        summary=True,
    )
    replays = check_graph_replays(rng)
    verdict = "OK" if max(replays) < 0.05 else "WRONG"
    say(f"graph replays {verdict}: decode {replays[0]:.4f}, prefill {replays[1]:.4f}", True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=140.0)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--parts", nargs="+", default=["correct", "time", "chain", "sweep"])
    options = parser.parse_args()
    begin = time.monotonic()
    end = begin + options.budget_s
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", summary=True)
    bad: set[tuple[str, tuple[int, ...]]] = set()
    try:
        bad = precompile(options.parts, options.processes)
    except BrokenProcessPool as error:
        say(f"a compiling process died, the rest compiles here: {error}", summary=True)
    steps: list[tuple[str, Callable[[], None]]] = []
    if "correct" in options.parts:
        steps.append(("correct", check_correctness))
    if set(options.parts) != {"correct"}:
        bench = DecodeBench()
    if "fused" in options.parts:
        steps.append(("fused bits", lambda: check_fused(FUSED_SHAPES, row_error)))
        steps.append(("fused times", lambda: time_fused(bench)))
    if "fused-sweep" in options.parts:
        broken = {FUSED_TILES[tiles[0]] for kind, tiles in bad if kind == "fused" and tiles}
        steps.append(("fused sweep", lambda: sweep_fused(bench, broken, end)))
    if "time" in options.parts:
        steps += [("time decode", lambda: time_decode(bench)), ("time prefill", time_prefill)]
        steps.append(("time store", time_store))
    if "chain" in options.parts:
        steps.append(("chain", lambda: time_chain(bench)))
    if "sweep" in options.parts:
        steps.append(("sweep prefill", lambda: sweep_prefill(bad, end - 30)))
        steps.append(("sweep decode", lambda: sweep_decode(bench, bad, end)))
    for name, step in steps:
        if time.monotonic() > end:
            say(f"{name} left out: the time was spent", summary=True)
            continue
        try:
            step()
        except Exception:
            traceback.print_exc()
            say(f"{name} FAILED: {traceback.format_exc().splitlines()[-1]}", summary=True)
        say(f"[{time.monotonic() - begin:.0f} s] {name}")
    print("\nSUMMARY", *SUMMARY, f"{time.monotonic() - begin:.0f} s in all", sep="\n", flush=True)


if __name__ == "__main__":
    main()
