"""The products of the models that the kernels are tuned for, and how one is called and checked.

Used by the scripts that run on a GPU. Legend: T tokens, N outputs, K inputs, F MLP width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from cearx.kernels import layer_linear
from cearx.kernels.fp8_weight import Fp8Weight, Weight, exact_weight
from cearx.kernels.scaled_product import RoundedRows
from cearx.kernels.scaled_rows import MAX_SQUARES, NextNorm, ScaledRows

EPS = 1e-6
PARTS = 64
"""Tiles of the product before a norm."""


@dataclass(frozen=True)
class Product:
    """One product of a model: which operation runs it and its weight matrix [N, K]."""

    name: str
    kind: Literal["norm_linear", "norm_gate_up", "linear_add", "linear"]
    num_outputs: int
    num_inputs: int

    @property
    def num_bytes(self) -> int:
        """Of the matrix in bfloat16."""
        return 2 * self.num_outputs * self.num_inputs


QWEN3_8B = (
    Product("8B qkv", "norm_linear", 6144, 4096),
    Product("8B o", "linear_add", 4096, 4096),
    Product("8B gate_up", "norm_gate_up", 24576, 4096),
    Product("8B down", "linear_add", 4096, 12288),
    Product("8B head", "linear", 151936, 4096),
)
QWEN3_06B = (
    Product("0.6B qkv", "norm_linear", 4096, 1024),
    Product("0.6B o", "linear_add", 1024, 2048),
    Product("0.6B gate_up", "norm_gate_up", 6144, 1024),
    Product("0.6B down", "linear_add", 1024, 3072),
    Product("0.6B head", "linear", 151936, 1024),
)


class Operands:
    """The inputs and outputs of one product for a number of tokens, in bfloat16 on the GPU."""

    def __init__(self, product: Product, num_tokens: int) -> None:
        rows, width = product.num_outputs, product.num_inputs
        self.product = product
        self.x_TK = torch.randn(num_tokens, width, device="cuda").bfloat16()
        self.norm_K = (1 + 0.1 * torch.randn(width, device="cuda")).bfloat16()
        self.scratch_TK = torch.empty_like(self.x_TK)
        self.wide_TN = torch.empty(num_tokens, rows, device="cuda", dtype=torch.bfloat16)
        columns = rows // 2 if product.kind == "norm_gate_up" else rows
        self.out_TN = torch.zeros(num_tokens, columns, device="cuda", dtype=torch.bfloat16)
        squares_PT = torch.empty(PARTS, num_tokens, dtype=torch.float32, device="cuda")
        self.rows = ScaledRows(torch.empty_like(self.x_TK), squares_PT, EPS)
        self._leave_rows()
        squares = torch.empty(MAX_SQUARES, dtype=torch.float32, device="cuda")
        next_weight_N = torch.ones(rows, dtype=torch.bfloat16, device="cuda")
        self.next_norm = NextNorm(next_weight_N, EPS, torch.empty_like(self.wide_TN), squares)
        self.rounded = RoundedRows.allocate(
            num_tokens, width, columns, torch.bfloat16, self.x_TK.device
        )

    def run(self, weight: Weight) -> None:
        """Launches the operation; `linear_add` adds to what `out_TN` holds.

        A kernel that can take or leave rows does: the norm's own kernel counts where it cannot.
        """
        gated = self.product.kind == "norm_gate_up"
        takes = layer_linear.takes_rows(len(self.x_TK), weight, gated=gated)
        rows = self.rows if takes else None
        if self.product.kind == "norm_linear":
            layer_linear.norm_linear(
                self.x_TK,
                self.norm_K,
                EPS,
                weight,
                None,
                self.out_TN,
                self.scratch_TK,
                rows,
                self.rounded,
            )
        elif self.product.kind == "norm_gate_up":
            layer_linear.norm_gate_up(
                self.x_TK,
                self.norm_K,
                EPS,
                weight,
                self.out_TN,
                self.scratch_TK,
                self.wide_TN,
                rows,
                self.rounded,
            )
        elif self.product.kind == "linear_add":
            layer_linear.linear_add(
                self.x_TK, weight, None, self.out_TN, self.next_norm, self.rounded
            )
        else:
            assert isinstance(weight, torch.Tensor), "a head is not rounded"
            layer_linear.linear(self.x_TK, weight, self.out_TN)

    def _leave_rows(self) -> None:
        """What a product before `x_TK`'s norm would have left of it."""
        x_TK = self.x_TK.float()
        self.rows.scaled_TE.copy_(x_TK * self.norm_K.float())
        squares_TK = torch.nn.functional.pad(x_TK.square(), (0, -x_TK.shape[1] % PARTS))
        self.rows.squares_PT.copy_(squares_TK.unflatten(1, (PARTS, -1)).sum(-1).t())

    def relative_error(self, weight: Weight, replay: Callable[[], None] | None = None) -> float:
        """Of one run, or replay of one, into poisoned or zeroed outputs, against float32."""
        self._leave_rows()
        self.out_TN.fill_(0 if self.product.kind == "linear_add" else torch.nan)
        self.scratch_TK.fill_(torch.nan)
        self.wide_TN.fill_(torch.nan)
        if replay is None:
            self.run(weight)
        else:
            replay()
        wanted = self._reference(weight)
        return ((self.out_TN.float() - wanted).norm() / wanted.norm()).item()

    def _reference(self, weight: Weight) -> torch.Tensor:
        if self.product.kind == "norm_linear":
            return layer_linear.norm_linear_reference(self.x_TK, self.norm_K, EPS, weight, None)
        if self.product.kind == "norm_gate_up":
            return layer_linear.norm_gate_up_reference(self.x_TK, self.norm_K, EPS, weight)
        return self.x_TK.float() @ exact_weight(weight).t()


def random_weight(product: Product, *, fp8: bool) -> Weight:
    """Of the size of trained ones, on the GPU."""
    shape = (product.num_outputs, product.num_inputs)
    weight_NK = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    weight_NK.normal_(std=product.num_inputs**-0.5)
    if not fp8:
        return weight_NK
    rounded = Fp8Weight.empty(*shape, weight_NK.dtype, weight_NK.device)
    rounded.store(weight_NK)
    return rounded


def graph_us(launch: Callable[[], None], num_calls: int, replays: int = 5) -> float:
    """Microseconds a call of `num_calls` calls captured in one CUDA graph; the median replay."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 1000 * sorted(times[1:])[replays // 2] / num_calls
