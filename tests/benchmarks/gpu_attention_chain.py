"""A layer's attention of decodes and output product in one CUDA graph, launched both ways.

Owns the comparison of programmatic dependent launch with plain launches: their times, and that the
bits agree although every product reads what the kernel before it wrote. Run by `gpu_attention.py`.
"""

from collections.abc import Callable

import torch
from gpu_attention_times import DEVICE, DTYPE, MODELS, DecodeBench, graph_us, say
from paged_attention import Heads
from torch import Tensor

from cearx.kernels import dependent_launch
from cearx.kernels.gemv import GemvConfig, gemv
from cearx.kernels.position_and_attend import position_and_attend
from cearx.kernels.row_splits import make_scratch

ROWS, CONTEXTS = (1, 4), (64, 288, 1024, 4096)
LAYERS = 36
PRODUCT = GemvConfig(block_n=4, block_k=256, num_warps=1, ahead=4)


class Chain:
    """Layers that have their own blocks, weights and outputs, over one packed qkv."""

    def __init__(self, bench: DecodeBench, heads: Heads, rows: int, context: int) -> None:
        torch.manual_seed(rows * context)
        self.bench, self.heads, self.rows = bench, heads, rows
        width, blocks = heads.num_q_heads * heads.head_dim, -(-context // heads.block_size)
        self.first_qkv_RX = torch.randn(rows, heads.qkv_size, dtype=DTYPE, device=DEVICE)
        self.qkv_RX = self.first_qkv_RX.clone()
        self.norm_D = torch.rand(heads.head_dim, device=DEVICE).to(DTYPE)
        self.cos_sin_LD = torch.rand(context, heads.head_dim, device=DEVICE)
        self.seats_R = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.lengths_R = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        order = bench.order[: LAYERS * rows * blocks]
        self.tables_LSM = order.view(LAYERS, rows, blocks)
        last_block_LR = self.tables_LSM[:, :, -1].long()
        offset = (context - 1) % heads.block_size
        self.last_block_LR, self.offset = last_block_LR, offset
        self.out_LRND = torch.empty(
            LAYERS, rows, heads.num_q_heads, heads.head_dim, dtype=DTYPE, device=DEVICE
        )
        self.weight_LNK = torch.randn(LAYERS, 1024, width, dtype=DTYPE, device=DEVICE)
        self.y_LRN = torch.zeros(LAYERS, rows, 1024, dtype=DTYPE, device=DEVICE)
        self.scratch = make_scratch(rows, heads.num_q_heads, heads.head_dim, DEVICE)

    def launch(self, layer: int) -> None:
        """The two kernels of one layer."""
        position_and_attend(
            self.qkv_RX,
            self.norm_D,
            self.norm_D,
            1e-6,
            self.cos_sin_LD,
            self.bench.kv,
            self.tables_LSM[layer],
            self.seats_R,
            self.lengths_R,
            self.out_LRND[layer],
            self.scratch,
            self.heads.head_dim**-0.5,
        )
        gemv(self.out_LRND[layer].flatten(1), self.weight_LNK[layer], self.y_LRN[layer], PRODUCT)

    def run(self, dependent: bool) -> tuple[float, Tensor, Tensor]:
        """(us a layer, attention outputs, products) of one way of launching."""
        dependent_launch.ENABLED = dependent
        launches: list[Callable[[], None]] = []
        for layer in range(LAYERS):
            launches.append(lambda layer=layer: self.launch(layer))
        graph = torch.cuda.CUDAGraph()
        us = graph_us(launches)
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        # The slots that this launch writes are NaN: who reads one, or an output too early, shows.
        self.qkv_RX.copy_(self.first_qkv_RX)
        self.bench.kv[self.last_block_LR.flatten(), :, :, self.offset] = torch.nan
        graph.replay()
        torch.cuda.synchronize()
        assert not self.scratch.arrived.any(), "a counter was not put back"
        return us, self.out_LRND.clone(), self.y_LRN.clone()


def time_chain(bench: DecodeBench) -> None:
    before = dependent_launch.ENABLED
    try:
        for model, heads in MODELS.items():
            for rows in ROWS:
                cells, equal = [], True
                for context in CONTEXTS:
                    chain = Chain(bench, heads, rows, context)
                    dependent, *results = chain.run(True)
                    plain, *expected = chain.run(False)
                    equal &= all(map(torch.equal, results, expected))
                    cells.append(f"{context}: {plain:.1f} > {dependent:.1f} us")
                verdict = "OK" if equal else "WRONG"
                say(f"chain {model} R={rows} plain > dependent | " + " | ".join(cells), True)
                say(f"  bits of both ways {verdict}", True)
    finally:
        dependent_launch.ENABLED = before
