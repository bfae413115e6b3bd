"""Times cuBLAS against this tree's kernels for every product of two models, and writes the table.

Runs by hand on a GPU. Every candidate runs whole operations, norm and SiLU included, over rotating
copies of the weights, larger than the L2 cache, in one CUDA graph, and is checked against float32
first. Products around a norm are chosen in pairs, as two kernels need no norm between them. With
`--pdl` kernels are launched dependently; with `--fp8` weights are of 8 bits, and the other table of
the file is written.

    PYTHONPATH=.typing python tests/benchmarks/tune_linear.py --output linear_table.py
"""

import argparse
import dataclasses
import functools
import itertools
import math
import multiprocessing
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from linear_shapes import (
    EPS,
    QWEN3_06B,
    QWEN3_8B,
    Operands,
    Product,
    graph_us,
    random_weight,
)

from cearx.kernels import dependent_launch, layer_linear
from cearx.kernels.gemv import GemvConfig
from cearx.kernels.layer_linear import Choice
from cearx.kernels.norm import rms_norm
from cearx.kernels.skinny_linear import SkinnyConfig

TYPE = ": dict[tuple[int, int, int], GemvConfig | SkinnyConfig | None] = {"
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
PROGRAMS = (132, 264)
"""Programs that a split product aims at: one and two a multiprocessor."""
ROTATION_BYTES = 240_000_000
MIN_CALLS = 32
"""Operations in a graph, so that its launch does not count."""
MIN_GAIN = 0.985
"""A kernel must take less than this share of cuBLAS's time to be chosen."""
MAX_ERROR = 1e-2
MAX_ERROR_ROUNDED = 6e-2
"""Of the library's product of 8-bit weights, which rounds the inputs as well."""

Job = tuple[Product, int, Choice]
# (outputs, inputs, warps, steps ahead): 256 inputs a warp lie in the registers as they were loaded.
GEMV = tuple(
    GemvConfig(*numbers)
    for numbers in (
        (1, 1024, 4, 4),
        (2, 1024, 4, 4),
        (4, 1024, 4, 2),
        (8, 1024, 4, 1),
        (1, 2048, 8, 3),
        (2, 2048, 8, 2),
        (4, 2048, 8, 1),
        (1, 4096, 16, 3),
        (2, 4096, 16, 2),
        (2, 512, 2, 4),
        (4, 512, 2, 2),
        (4, 256, 1, 4),
        (8, 256, 1, 2),
    )
)
FP8_GEMV = (
    *GEMV,
    GemvConfig(4, 2048, 8, 2),
    GemvConfig(8, 2048, 8, 1),
    GemvConfig(4, 1024, 4, 4),
    GemvConfig(8, 1024, 4, 2),
    GemvConfig(4, 512, 2, 4),
    GemvConfig(8, 512, 2, 2),
)
"""With half the bytes a row, more rows are on their way at once."""
MAX_SUMS = 16
"""Blocks of sums a program may keep; each takes 8 registers of a thread."""
MAX_UNROLLED = 96
"""Block products in a kernel, which has no loop; with more the registers do not suffice."""
SKINNY_16 = (
    SkinnyConfig(64, 128, 4, 4),
    SkinnyConfig(64, 128, 4, 5),
    SkinnyConfig(64, 128, 2, 3),
    SkinnyConfig(64, 128, 2, 4),
    SkinnyConfig(64, 128, 2, 5),
    SkinnyConfig(64, 64, 2, 8),
    SkinnyConfig(64, 256, 2, 3),
    SkinnyConfig(32, 128, 4, 5),
    SkinnyConfig(32, 128, 2, 5),
    SkinnyConfig(32, 128, 2, 8),
    SkinnyConfig(32, 256, 2, 4),
    SkinnyConfig(16, 256, 2, 5),
    SkinnyConfig(16, 256, 1, 5),
    SkinnyConfig(16, 512, 2, 4),
    SkinnyConfig(16, 512, 2, 3),
    SkinnyConfig(64, 128, 2, 2),
    SkinnyConfig(32, 128, 2, 4),
    SkinnyConfig(32, 256, 2, 3),
)
SKINNY_64 = (
    SkinnyConfig(64, 128, 4, 3),
    SkinnyConfig(64, 64, 4, 6),
    SkinnyConfig(64, 128, 2, 3),
    SkinnyConfig(64, 64, 2, 6),
    SkinnyConfig(32, 128, 2, 4),
    SkinnyConfig(32, 128, 2, 5),
    SkinnyConfig(128, 64, 4, 4),
    SkinnyConfig(128, 64, 8, 4),
    SkinnyConfig(32, 128, 4, 4),
)


def candidates(product: Product, num_tokens: int, fp8: bool = False) -> list[Choice]:
    """What may run a product; the library, which is None, comes first."""
    found: list[Choice] = [None]
    halves = 2 if product.kind == "norm_gate_up" else 1
    for gemv in (FP8_GEMV if fp8 else GEMV) if num_tokens <= 8 else ():
        sums = num_tokens * halves * gemv.block_n
        steps = product.num_inputs // gemv.block_k
        if 0 < steps * sums <= MAX_UNROLLED and sums <= MAX_SUMS:
            found.append(gemv)
    if num_tokens == 1:
        return found
    for base in SKINNY_16 if num_tokens <= 16 else SKINNY_64:
        tiles = product.num_outputs // halves // base.block_n
        splits = {min(16, math.ceil(programs / tiles)) for programs in PROGRAMS}
        for split_k in sorted({1} if halves == 2 else splits):
            found.append(dataclasses.replace(base, split_k=split_k))
    return found


def force(choice: Choice) -> None:
    """Makes every product run by `choice`."""
    layer_linear.choose = lambda *_: choice  # type: ignore[assignment]
    layer_linear.choose_fp8 = lambda *_: choice  # type: ignore[assignment]


def compile_one(job: Job, fp8: bool = False) -> str | None:
    """Compiles what the job needs into the cache on disk; says what went wrong."""
    product, num_tokens, choice = job
    force(choice)
    try:
        Operands(product, num_tokens).run(random_weight(product, fp8=fp8))
        torch.cuda.synchronize()
    except Exception as error:  # too many registers, too much shared memory: not a candidate
        return f"{product.name} {num_tokens} {choice}: {error}"[:200]
    return None


def set_launch(pdl: bool) -> None:
    """Of this process."""
    dependent_launch.ENABLED = pdl


def compiled_as(job: Job) -> Job:
    """The job whose kernel this one shares: tensor cores see at least 16 tokens."""
    product, num_tokens, choice = job
    return product, max(16, num_tokens) if isinstance(choice, SkinnyConfig) else num_tokens, choice


def compile_all(jobs: list[Job], num_processes: int, pdl: bool, fp8: bool = False) -> set[Job]:
    """Compiles in parallel; returns the jobs that cannot run here."""
    distinct = {compiled_as(job): job for job in jobs}
    ordered = [job for job in distinct.values() if job[2] is not None]
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes, set_launch, (pdl,)) as pool:
        answers = pool.map(functools.partial(compile_one, fp8=fp8), ordered, chunksize=1)
    for answer in filter(None, answers):
        print(answer, flush=True)
    failed = {compiled_as(job) for job, answer in zip(ordered, answers, strict=True) if answer}
    return {job for job in jobs if compiled_as(job) in failed}


def time_product(
    product: Product, jobs: list[Job], broken: set[Job], fp8: bool = False
) -> dict[int, dict[Choice, float]]:
    """Microseconds of every job of one product, by number of tokens."""
    num_bytes = product.num_bytes // 2 if fp8 else product.num_bytes
    copies = max(2, math.ceil(ROTATION_BYTES / num_bytes))
    weights = [random_weight(product, fp8=fp8) for _ in range(copies)]
    times: dict[int, dict[Choice, float]] = {}
    for job in jobs:
        _, num_tokens, choice = job
        if job in broken:
            continue
        force(choice)
        operands = Operands(product, num_tokens)
        error = operands.relative_error(weights[-1])
        if not error < (MAX_ERROR_ROUNDED if fp8 and choice is None else MAX_ERROR):
            print(f"WRONG {product.name} {num_tokens} {choice}: error {error}", flush=True)
            continue
        rounds = math.ceil(MIN_CALLS / copies)

        def launch(operands: Operands = operands, rounds: int = rounds) -> None:
            for _ in range(rounds):
                for weight in weights:
                    operands.run(weight)

        us = graph_us(launch, rounds * copies, replays=3)
        times.setdefault(num_tokens, {})[choice] = us
    return times


def time_norm(num_tokens: int, width: int) -> float:
    """Microseconds of a norm's own kernel between two others."""
    x_TE = torch.randn(num_tokens, width, device="cuda").bfloat16()
    weight_E, out_TE = torch.ones_like(x_TE[0]), torch.empty_like(x_TE)

    def launch() -> None:
        for _ in range(MIN_CALLS):
            rms_norm(x_TE, weight_E, EPS, out_TE)

    return graph_us(launch, MIN_CALLS)


def best(times: dict[Choice, float]) -> Choice:
    """The fastest, the library unless a kernel is clearly so."""
    fastest = min(times, key=lambda choice: times[choice])
    return fastest if times[fastest] < MIN_GAIN * times[None] else None


def best_pair(
    before: dict[Choice, float], behind: dict[Choice, float], norm_us: float
) -> tuple[Choice, Choice]:
    """For a product that adds to the residual and the one behind the norm that follows.

    Tensor cores' kernels behind the norm were timed with rows that a kernel before it has left;
    behind the library's product they need the norm's kernel.
    """

    def us(pair: tuple[Choice, Choice]) -> float:
        has_norm = isinstance(pair[1], SkinnyConfig) and pair[0] is None
        return before[pair[0]] + behind[pair[1]] + (norm_us if has_norm else 0.0)

    fastest = min(itertools.product(before, behind), key=us)
    return fastest if us(fastest) < MIN_GAIN * us((None, None)) else (None, None)


def source(table: dict[tuple[int, int, int], Choice], fp8: bool) -> str:
    """The file that holds the tables, with one of them written anew."""
    old = Path(layer_linear.__file__).with_name("linear_table.py").read_text()
    begin = old.index("\nFP8_TABLE:" if fp8 else "\nTABLE:") + 1
    opening = old.index("{", begin)
    end = old.index("}", opening) + 1
    name = old[begin : old.index(":", begin)]
    lines = [name + TYPE]
    lines += [
        f"    {key}: {constructor(choice)},"
        for key, choice in sorted(table.items(), key=lambda item: item[0])
    ]
    return old[:begin] + "\n".join([*lines, "}"]) + old[end:]


def constructor(choice: Choice) -> str:
    """A choice in short."""
    if choice is None:
        return "None"
    return f"{type(choice).__name__}({', '.join(map(str, dataclasses.astuple(choice)))})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pdl", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=BUCKETS)
    arguments = parser.parse_args()
    set_launch(arguments.pdl)
    start = time.monotonic()
    fp8 = arguments.fp8
    models = [model[:4] if fp8 else model for model in (QWEN3_8B, QWEN3_06B)]
    products = [product for model in models for product in model]
    jobs: list[Job] = [
        (product, num_tokens, choice)
        for product in products
        for num_tokens in arguments.tokens
        for choice in candidates(product, num_tokens, fp8)
    ]
    broken = compile_all(jobs, arguments.processes, arguments.pdl, fp8)
    print(f"{len(jobs)} candidates compiled after {time.monotonic() - start:.0f} s", flush=True)
    times = {
        product: time_product(product, [job for job in jobs if job[0] is product], broken, fp8)
        for product in products
    }
    table: dict[tuple[int, int, int], Choice] = {}
    for num_tokens in arguments.tokens:
        for model in models:
            qkv, out, gate_up, down, *heads = model
            norm_us = time_norm(num_tokens, qkv.num_inputs)
            chosen = {head: best(times[head][num_tokens]) for head in heads}
            for before, behind in ((out, gate_up), (down, qkv)):
                pair = times[before][num_tokens], times[behind][num_tokens]
                chosen[before], chosen[behind] = best_pair(*pair, norm_us)
            for product in model:
                by_choice = times[product][num_tokens]
                print(f"{product.name} {num_tokens}: library {by_choice[None]:.1f} us")
                for choice, us in sorted(by_choice.items(), key=lambda item: item[1])[:4]:
                    mark = "*" if choice == chosen[product] else " "
                    print(f"  {mark} {us:7.1f} {choice}", flush=True)
                table[num_tokens, product.num_outputs, product.num_inputs] = chosen[product]
    arguments.output.write_text(source(table, fp8))
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
