"""8-bit weights and KV on a GPU: every product, whole models, and what they save of a decode step.

Runs by hand. Products are compared with float32 and the same rounded weights, then timed beside
16-bit ones over copies that no cache holds. A small model's tokens must be the same eager and from
graphs; its logits beside the CPU's with exact weights are the accuracy that is paid. Last the 8B's
decode steps.

    python tests/gpu/check_fp8.py --output check_fp8.json
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / ".typing"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))

import torch
from check_worker import check_small, start_model, time_decodes, time_prefill
from linear_shapes import QWEN3_06B, QWEN3_8B, Operands, Product, graph_us, random_weight
from paged_attention import Heads, make_decode_rows, make_problem, relative_error

from cearx.kernels.decode_attention import decode_attention, reference_decode_attention
from cearx.kernels.layer_linear import choice_for
from cearx.kernels.paged_kv import FP8
from cearx.kernels.position_and_attend import position_and_attend, reference_position_and_attend
from cearx.kernels.prefill_attention import prefill_attention, reference_prefill_attention
from cearx.kernels.row_splits import make_scratch

TOKENS = (1, 2, 4, 16, 64, 512)
PRODUCTS = (*QWEN3_8B[:4], *QWEN3_06B[:4])
ODD = (
    Product("odd", "norm_linear", 1111, 904),
    Product("odd", "linear_add", 577, 1000),
    Product("odd", "norm_gate_up", 1210, 776),
    Product("odd 16", "linear_add", 1040, 1008),
)
ODD_TOKENS = (1, 3, 7, 17, 33, 64, 65, 130, 300)
COPIES_BYTES = 240_000_000
MAX_ERROR, MAX_ERROR_ROUNDED = 1e-2, 6e-2
"""Of kernels that take exact activations, and of the library's product, which rounds them."""
STEPS = ((1, 32), (16, 32), (64, 32), (64, 1024))
"""(requests, tokens of each when the timing begins)."""

HEADS = (Heads(32, 8, 128, 64), Heads(16, 8, 128, 64), Heads(9, 3, 64, 16), Heads(28, 4, 128, 32))
LENGTHS = [1, 15, 64, 300, 1023, 2048, 4096, 9000]
MAX_ERROR_KV = 8e-2
"""Largest difference over the root mean square, in bfloat16."""

Job = tuple[Product, int, bool]


def compile_one(job: Job) -> str | None:
    """Compiles a product's kernels into the cache on disk; says what went wrong."""
    product, num_tokens, fp8 = job
    try:
        Operands(product, num_tokens).run(random_weight(product, fp8=fp8))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{product.name} {product.kind} {num_tokens} fp8={fp8}: {error}"[:400]
    return None


def check_product(product: Product, num_tokens: int) -> dict[str, Any]:
    """The error of a run, and of a graph's replay with other inputs."""
    operands, weight = Operands(product, num_tokens), random_weight(product, fp8=True)
    choice = choice_for(num_tokens, weight, gated=product.kind == "norm_gate_up")
    errors = [operands.relative_error(weight)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operands.run(weight)
    operands.x_TK.copy_(torch.randn_like(operands.x_TK))
    errors.append(operands.relative_error(weight, graph.replay))
    limit = MAX_ERROR_ROUNDED if choice is None else MAX_ERROR
    is_right = max(errors) < limit
    return {
        "product": f"{product.name} {product.kind} {num_tokens}",
        "kernel": str(choice),
        "error": round(max(errors), 5) if math.isfinite(max(errors)) else str(errors),
        "right": is_right,
    }


def time_product(product: Product, num_tokens: int) -> dict[str, Any]:
    """Microseconds with 16-bit and with 8-bit weights, and TB/s of the weights."""
    found: dict[str, Any] = {}
    for name, fp8 in (("bf16", False), ("fp8", True)):
        num_bytes = product.num_bytes // (2 if fp8 else 1)
        copies = max(2, math.ceil(COPIES_BYTES / num_bytes))
        weights = [random_weight(product, fp8=fp8) for _ in range(copies)]
        operands = Operands(product, num_tokens)
        rounds = math.ceil(16 / copies)

        def launch(weights: Any = weights, operands: Any = operands, rounds: int = rounds) -> None:
            for _ in range(rounds):
                for weight in weights:
                    operands.run(weight)

        us = graph_us(launch, rounds * copies, replays=3)
        found[name] = round(us, 2)
        found[f"{name} TB/s"] = round(num_bytes / us / 1e6, 2)
    return found


def check_products() -> list[dict[str, Any]]:
    jobs = [(p, m, fp8) for p in PRODUCTS for m in TOKENS for fp8 in (False, True)]
    jobs += [(p, m, True) for p in ODD for m in ODD_TOKENS]
    begin = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        for failure in filter(None, pool.map(compile_one, jobs, chunksize=2)):
            print("CANNOT RUN", failure, flush=True)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    rows = []
    for product, num_tokens, fp8 in jobs:
        if not fp8:
            continue
        try:
            row = check_product(product, num_tokens)
            if product in PRODUCTS:
                row |= time_product(product, num_tokens)
        except Exception as error:
            row = {"product": f"{product.name} {num_tokens}", "right": False, "error": str(error)}
        rows.append(row)
        print("" if row["right"] else "WRONG ", row, flush=True)
    return rows


def check_kv(heads: Heads, device: torch.device) -> dict[str, Any]:
    """Errors of the attention kernels over an e4m3 pool, and of the same over bfloat16."""
    found: dict[str, Any] = {"heads": str(heads)}
    for kind in (torch.bfloat16, FP8):
        exact = make_problem(heads, LENGTHS, dtype=torch.bfloat16, device=device, seed=3)
        problem = dataclasses.replace(exact, kv_B2KPD=exact.kv_B2KPD.to(kind))
        scratch = make_scratch(len(LENGTHS), heads.num_q_heads, heads.head_dim, device)
        tables = (problem.kv_B2KPD, problem.block_tables_SM, problem.seats)
        q_RND = exact.queries(len(LENGTHS), seed=7)
        out_RND = torch.full_like(q_RND, torch.nan)
        decode_attention(q_RND, *tables, problem.lengths, out_RND, scratch, problem.scale)
        wanted = reference_decode_attention(q_RND, *tables, problem.lengths, problem.scale)
        found[f"decode {kind}"] = relative_error(out_RND, wanted)

        chunks = [1, 9, 64, 100, 3, 700, 512, 130]
        cu_seqlens = torch.tensor([0, *chunks]).cumsum(0).to(device, torch.int32)
        q_TND = exact.queries(sum(chunks), seed=8)
        out_TND = torch.full_like(q_TND, torch.nan)
        inputs = (q_TND, *tables, cu_seqlens, problem.lengths)
        prefill_attention(*inputs, out_TND, max(chunks), problem.scale)
        wanted = reference_prefill_attention(*inputs, problem.scale)
        found[f"prefill {kind}"] = relative_error(out_TND, wanted)

        rows = make_decode_rows(exact, with_norm=True, seed=2)
        pool = dataclasses.replace(rows.problem, kv_B2KPD=rows.problem.kv_B2KPD.to(kind))
        rows = dataclasses.replace(rows, problem=pool)
        wanted, _ = reference_position_and_attend(*rows.arguments(), problem.scale)
        out_RND = torch.full_like(out_RND, torch.nan)
        position_and_attend(*rows.arguments(), out_RND, scratch, problem.scale)
        found[f"attend {kind}"] = relative_error(out_RND, wanted)
    errors = [error for error in found.values() if isinstance(error, float)]
    found["right"] = max(errors) < MAX_ERROR_KV
    print("" if found["right"] else "WRONG ", found, flush=True)
    return found


def check_model(name: str, device: torch.device, **flags: Any) -> dict[str, Any]:
    """Start-up's memory and milliseconds of decode steps and prompts."""
    started, sizes = start_model(
        name, device, Path.cwd(), max_num_seqs=64, cuda_graph_sizes="1,16,64", **flags
    )
    found: dict[str, Any] = {
        "memory": started.memory_table.splitlines(),
        "stages s": started.stage_seconds,
    }
    print("\n".join(found["memory"]), found["stages s"], flush=True)
    for count, context in STEPS:
        timed = time_decodes(started.runner, count, context, sizes.block_size)
        found[f"C{count} context {context}"] = timed
        brief = {key: value for key, value in timed.items() if key != "kernels"}
        print(name, flags, count, context, brief, flush=True)
    for count, length in ((1, 32), (1, 4096)):
        found[f"prefill {count}x{length}"] = time_prefill(
            started.runner, count, length, sizes.block_size
        )
        print(name, "prefill", count, length, found[f"prefill {count}x{length}"], flush=True)
    found["late compiles"] = started.compile_watch.num_late
    started.compile_watch.disarm()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["kv", "products", "small", "8b"])
    parser.add_argument("--output", type=Path, default=Path("check_fp8.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("check_fp8: no CUDA device")
        return 2
    begin = time.monotonic()
    device = torch.device("cuda", 0)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    if "kv" in arguments.parts:
        results["kv"] = [check_kv(heads, device) for heads in HEADS]
    if "products" in arguments.parts:
        results["products"] = check_products()
    for name, kv_dtype in (("tiny", None), ("medium", FP8)) if "small" in arguments.parts else ():
        results[name] = check_small(name, device, fp8=True, kv_dtype=kv_dtype)
        print(
            name,
            "keys and values:",
            kv_dtype,
            results[name],
            f"{time.monotonic() - begin:.0f} s",
            flush=True,
        )
    if "8b" in arguments.parts:
        results["8b"] = check_model("qwen3_8b", device, quantization="fp8", kv_cache_dtype="fp8")
    if "8b-weights" in arguments.parts:
        results["8b-weights"] = check_model("qwen3_8b", device, quantization="fp8")
    arguments.output.write_text(json.dumps(results, indent=1))
    print(f"{time.monotonic() - begin:.0f} s")
    checked = [*results.get("kv", []), *results.get("products", [])]
    return 0 if all(row["right"] for row in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
