"""The linear operations, norms, SiLU and sampling on a GPU: right first, then microseconds.

Runs by hand. The chain is every product of one decode step of Qwen3-8B and of Qwen3-0.6B, each
layer with weights of its own, without attention, in one CUDA graph: with cuBLAS and separate
kernels, as the table says, and as the table says with dependent launches.

    PYTHONPATH=.typing python tests/benchmarks/gpu_linear.py
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tune_linear import compile_all, set_launch

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from linear_shapes import EPS, QWEN3_06B, QWEN3_8B, Operands, Product, graph_us
from sampling_rows import Row, on_cpu, on_device

from cearx.kernels import layer_linear
from cearx.kernels.gemv import GemvConfig
from cearx.kernels.layer_linear import Choice
from cearx.kernels.norm import rms_norm
from cearx.kernels.sampling import Mode, sample
from cearx.kernels.sampling_state import SamplingScratch, SamplingTable
from cearx.kernels.scaled_rows import MAX_SQUARES, NextNorm
from cearx.kernels.silu_mul import silu_mul
from cearx.kernels.skinny_linear import SkinnyConfig

MODELS = {"8B": (QWEN3_8B, 36), "0.6B": (QWEN3_06B, 28)}
TOKENS = (1, 2, 4, 8, 16, 32, 64)
MAX_ERROR = 1e-2
VOCAB = 151936
ODD = (
    Product("odd", "norm_linear", 1111, 904),
    Product("odd", "linear_add", 577, 1000),
    Product("odd", "norm_gate_up", 1210, 776),
    Product("odd", "linear", 50_257, 576),
)
FORCED: tuple[tuple[int, Choice], ...] = (
    (1, GemvConfig(2, 1024, 4, 1)),
    (3, GemvConfig(2, 512, 2, 1)),
    (8, GemvConfig(1, 512, 2, 1)),
    (7, SkinnyConfig(32, 64, 4, 3)),
    (16, SkinnyConfig(64, 128, 4, 4)),
    (33, SkinnyConfig(64, 64, 4, 4, 3)),
    (128, SkinnyConfig(128, 64, 8, 3, 2)),
    (5, None),
)
table_choice = layer_linear.choose


def use(choose: Callable[..., Choice]) -> None:
    """Lets `choose` decide about every product from now on."""
    layer_linear.choose = choose  # type: ignore[assignment]


def check_products(pdl: bool) -> Iterator[str]:
    """Odd sizes by every kind of kernel, alone and replayed from a graph with other inputs."""
    set_launch(pdl)
    for product in ODD:
        weight = torch.randn(product.num_outputs, product.num_inputs, device="cuda").bfloat16()
        for num_tokens, choice in FORCED:
            if isinstance(choice, SkinnyConfig) and product.kind in ("norm_gate_up", "linear"):
                choice = dataclasses.replace(choice, split_k=1)
            use(lambda *_, choice=choice: choice)
            operands = Operands(product, num_tokens)
            errors = [operands.relative_error(weight)]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                operands.run(weight)
            operands.x_TK.copy_(torch.randn_like(operands.x_TK))
            errors.append(operands.relative_error(weight, graph.replay))
            if not max(errors) < MAX_ERROR:
                yield f"{product.kind} {num_tokens} {choice} pdl={pdl}: {errors}"
    use(table_choice)


class Chain:
    """All products of a model's decode step."""

    def __init__(self, products: tuple[Product, ...], num_layers: int) -> None:
        self.layers = [[_weight(p) for p in products[:4]] for _ in range(num_layers)]
        self.head = _weight(products[4])
        self.norm = torch.ones(products[0].num_inputs, device="cuda", dtype=torch.bfloat16)
        self.squares = torch.empty(MAX_SQUARES, dtype=torch.float32, device="cuda")
        self.products = products

    def buffers(self, num_tokens: int) -> None:
        """Allocates what a step of so many tokens writes."""
        qkv, out, gate_up, down, head = self.products

        def empty(width: int) -> torch.Tensor:
            return torch.randn(num_tokens, width, device="cuda").bfloat16()

        self.first, self.x, self.scratch = (empty(qkv.num_inputs) for _ in range(3))
        self.qkv, self.attended = empty(qkv.num_outputs), empty(out.num_inputs)
        self.wide, self.mlp = empty(gate_up.num_outputs), empty(down.num_inputs)
        self.logits = empty(head.num_outputs)

    def run(self) -> None:
        """One step, from the same input every time."""
        self.x.copy_(self.first)
        rows = None
        next_norm = NextNorm(self.norm, EPS, self.scratch, self.squares)
        for qkv, out, gate_up, down in self.layers:
            layer_linear.norm_linear(
                self.x, self.norm, EPS, qkv, None, self.qkv, self.scratch, rows
            )
            takes = layer_linear.takes_rows(len(self.x), gate_up, gated=True)
            rows = layer_linear.linear_add(
                self.attended, out, None, self.x, next_norm if takes else None
            )
            layer_linear.norm_gate_up(
                self.x, self.norm, EPS, gate_up, self.mlp, self.scratch, self.wide, rows
            )
            takes = layer_linear.takes_rows(len(self.x), qkv, gated=False)
            rows = layer_linear.linear_add(
                self.mlp, down, None, self.x, next_norm if takes else None
            )
        rms_norm(self.x, self.norm, EPS, self.scratch)
        layer_linear.linear(self.scratch, self.head, self.logits)


def _weight(product: Product) -> torch.Tensor:
    weight = torch.empty(
        product.num_outputs, product.num_inputs, device="cuda", dtype=torch.bfloat16
    )
    return weight.normal_(std=product.num_inputs**-0.5)


def time_chain(name: str) -> Iterator[str]:
    """A line for each number of tokens."""
    products, num_layers = MODELS[name]
    chain = Chain(products, num_layers)
    for num_tokens in TOKENS:
        chain.buffers(num_tokens)
        milliseconds, results = [], []
        for choose, pdl in ((lambda *_: None, False), (table_choice, False), (table_choice, True)):
            use(choose)
            set_launch(pdl)
            milliseconds.append(graph_us(chain.run, 1) / 1000)
            results.append(chain.logits.clone())
        same = torch.equal(results[1], results[2])
        error = (
            (results[2].float() - results[0].float()).norm() / results[0].float().norm()
        ).item()
        yield (
            f"{name:4} M={num_tokens:3}  cuBLAS {milliseconds[0]:.3f}  table {milliseconds[1]:.3f}"
            f"  table+PDL {milliseconds[2]:.3f} ms  logits: {error:.4f} from cuBLAS's, PDL "
            + ("equal" if same else "DIFFERENT")
        )
    use(table_choice)
    set_launch(False)


def repeated_us(launch: Callable[[], None], calls: int = 20) -> float:
    """Microseconds of one launch among equal ones in a graph."""

    def several() -> None:
        for _ in range(calls):
            launch()

    return graph_us(several, calls)


def time_elementwise() -> Iterator[str]:
    """Norm and SiLU from one token to a full prefill."""
    for num_tokens in (1, 64, 16384):
        x = torch.randn(num_tokens, 4096, device="cuda").bfloat16()
        weight, out = x[0].clone(), torch.empty_like(x)
        norm_us = repeated_us(lambda x=x, w=weight, out=out: rms_norm(x, w, EPS, out))
        wide = torch.randn(num_tokens, 24576, device="cuda").bfloat16()
        narrow = wide[:, :12288].clone()
        silu_us = repeated_us(lambda wide=wide, narrow=narrow: silu_mul(wide, narrow))
        yield (
            f"T={num_tokens:5}  rms_norm 4096 {norm_us:.2f} us {4 * x.numel() / norm_us / 1e6:.2f} "
            f"TB/s  silu_mul 12288 {silu_us:.2f} us {6 * narrow.numel() / silu_us / 1e6:.2f} TB/s"
        )


def check_sampling() -> Iterator[str]:
    """Tokens beside the CPU's, and the time of each mode."""
    generator = np.random.default_rng(3)
    device = torch.device("cuda")
    logits = 3 * torch.randn(64, VOCAB)
    for dtype in (torch.bfloat16, torch.float32):
        for mode, top_k, top_p in CASES:
            rows = [
                Row(top_k=top_k, top_p=top_p, seed=int(generator.integers(2**63)), num_outputs=i)
                for i in range(64)
            ]
            if mode == "greedy":
                rows = [Row(temperature=0)] * 64
            tokens, _ = on_device(logits.to(dtype), rows, mode, device)
            wanted = on_cpu(logits.to(dtype), rows)
            different = sum(a != b for a, b in zip(tokens, wanted, strict=True))
            times = [sampling_us(dtype, mode, top_k, top_p, n) for n in (1, 16, 64)]
            yield (
                f"sample {dtype} {mode} top_k={top_k} top_p={top_p}: {different} of 64 tokens "
                "differ; 1, 16, 64 rows: " + " ".join(f"{us:.1f}" for us in times) + " us"
            )


CASES: tuple[tuple[Mode, int, float], ...] = (
    ("greedy", 0, 1.0),
    ("plain", 0, 1.0),
    ("filtered", 20, 0.95),
    ("filtered", 0, 0.95),
    ("filtered", 0, 1.0),
)


def sampling_us(dtype: torch.dtype, mode: Mode, top_k: int, top_p: float, rows: int) -> float:
    """Of one batch of equal rules."""
    device = torch.device("cuda")
    table = SamplingTable.allocate(rows + 1, device)
    table.temperature_S.fill_(1)
    table.top_k_S.fill_(top_k)
    table.top_p_S.fill_(top_p)
    scratch = SamplingScratch.allocate(rows, VOCAB, device)
    logits = (3 * torch.randn(rows, VOCAB, device=device)).to(dtype)
    seats = torch.arange(rows, dtype=torch.int32, device=device)
    tokens = torch.empty_like(seats)
    return repeated_us(lambda: sample(logits, seats, table, tokens, scratch, mode=mode))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--processes", type=int, default=16)
    arguments = parser.parse_args()
    start = time.monotonic()
    jobs = [
        (product, m, table_choice(m, product.num_outputs, product.num_inputs))
        for name in arguments.models
        for product in MODELS[name][0]
        for m in TOKENS
    ]
    for pdl in (False, True):
        compile_all(jobs, arguments.processes, pdl)
    lines = [f"compiled after {time.monotonic() - start:.0f} s"]
    for pdl in (False, True):
        wrong = list(check_products(pdl))
        lines += [f"WRONG {line}" for line in wrong] or [f"odd products right, pdl={pdl}"]
    for name in arguments.models:
        lines += time_chain(name)
        torch.cuda.empty_cache()
    lines += time_elementwise()
    lines += check_sampling()
    print("\n".join(lines))
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
