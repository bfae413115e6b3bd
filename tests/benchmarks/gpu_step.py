"""Milliseconds of the model's part of a decode step, every kernel of it in one CUDA graph.

Runs by hand on a GPU: the real decoder with random weights, all rows with the same context in
blocks that lie anywhere, without sampling, launched dependently or plainly. For comparing kernels
as they follow one another, which their own benchmarks cannot show. `--table` takes another table of
products, `--norms apart` leaves each norm a kernel of its own.

    PYTHONPATH=.typing python tests/benchmarks/gpu_step.py qwen3_8b --rows 1 4 16 64
"""

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import torch

from cearx.kernels import dependent_launch, layer_linear
from cearx.worker.cuda import decoder as decoder_module
from cearx.worker.cuda.decoder import DeviceDecoder, StepTensors, Workspace
from cearx.worker.model_config import ModelConfig, from_hf_config

MODELS = Path(__file__).parent / "models"
BLOCK_SIZE = 64
REPLAYS = 9


class Step:
    """A decoder with a pool for `max_rows` rows of `context` tokens."""

    def __init__(self, config: ModelConfig, max_rows: int, context: int) -> None:
        device = torch.device("cuda")
        self.decoder = DeviceDecoder(config, context + 1, torch.bfloat16, device)
        for slot in self.decoder.weight_slots().values():
            std = slot.shape[-1] ** -0.5 if len(slot.shape) > 1 else 1.0
            slot.fill(torch.randn(slot.shape, device=device).mul_(std).bfloat16())
        self.workspace = Workspace(config, max_rows, max_rows, torch.bfloat16, device)
        blocks_a_row = -(-context // BLOCK_SIZE)
        pool = (max_rows * blocks_a_row + 1, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.kv_layers = [
            torch.randn(pool, device=device, dtype=torch.bfloat16) for _ in range(config.num_layers)
        ]
        order = torch.randperm(pool[0] - 1, device=device).int()
        self.block_tables_SM = order.view(max_rows, blocks_a_row).contiguous()
        self.context = context

    def forward(self, num_rows: int) -> Callable[[], torch.Tensor]:
        """What runs one step of the first rows."""
        last = self.context - 1
        device = self.block_tables_SM.device
        blocks_R = self.block_tables_SM[:num_rows, last // BLOCK_SIZE].long()
        step = StepTensors(
            input_ids_T=torch.arange(num_rows, device=device),
            positions_T=torch.full((num_rows,), last, device=device),
            slots_T=blocks_R * BLOCK_SIZE + last % BLOCK_SIZE,
            block_tables_SM=self.block_tables_SM,
            seats_D=torch.arange(num_rows, device=device, dtype=torch.int32),
            seq_lens_D=torch.full((num_rows,), self.context, device=device, dtype=torch.int32),
        )
        return lambda: self.decoder.forward(step, self.kv_layers, self.workspace)


def graph_ms(launch: Callable[[], object]) -> float:
    """The median replay."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[REPLAYS // 2]


def difference_from_library(forward: Callable[[], torch.Tensor]) -> float:
    """Relative, of the logits, when every product is the library's and every norm a kernel."""
    logits_RV = forward().float()
    choose = layer_linear.choose
    layer_linear.choose = lambda *_: None  # type: ignore[assignment]
    library_RV = forward().float()
    layer_linear.choose = choose
    return float((logits_RV - library_RV).norm() / library_RV.norm())


def use_table(path: Path) -> None:
    """Replaces the entries that the file has."""
    spec = importlib.util.spec_from_file_location("other_table", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    layer_linear.TABLE.update(module.TABLE)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=288)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--norms", choices=["apart", "fused"], default="fused")
    parser.add_argument("--launches", choices=["auto", "dependent", "plain"], default="auto")
    arguments = parser.parse_args()
    if arguments.table:
        use_table(arguments.table)
    if arguments.norms == "apart":
        decoder_module.takes_rows = lambda *_, **__: False
    for name in arguments.models:
        config = from_hf_config(json.loads((MODELS / name / "config.json").read_text()))
        step = Step(config, max(arguments.rows), arguments.context)
        if arguments.launches != "auto":
            dependent_launch.ENABLED = arguments.launches == "dependent"
        times = [f"{graph_ms(step.forward(n)):.3f}" for n in arguments.rows]
        errors = [f"{difference_from_library(step.forward(n)):.4f}" for n in arguments.rows]
        print(f"{name} context {arguments.context} rows {arguments.rows}: ms {' '.join(times)}")
        print(f"    logits' relative difference from the library's products: {' '.join(errors)}")
        del step
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
