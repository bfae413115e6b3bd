"""What the CUDA worker decides at start: device, sizes, graphs, memory; and its warm-up."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from device_runners import device_decoder, use_references
from tiny_models import save_tiny, tiny_model
from worker_process import WorkerProcess

from cearx.core.child import StartupError
from cearx.core.config import ModelFiles, WorkerConfig, WorkerLaunch, graph_sizes
from cearx.core.messages import ProcessFailed
from cearx.worker.cuda.graph_runner import decode_graph_sizes, padded_size
from cearx.worker.cuda.memory import (
    RESERVE_BYTES,
    CudaMemoryPlan,
    Measured,
    cuda_memory_table,
    plan_cuda_memory,
)
from cearx.worker.cuda.start import build_model, build_runner, free_bytes, largest_prefill
from cearx.worker.cuda.warm_up import product_sizes, warm_products, warm_up
from cearx.worker.device import StepSizes, choose_sizes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""NumPy, which the interpreter computes with, warns where a GPU's result is infinite as well."""

MIB = 2**20


def sizes(
    device: str, seqs: int | None = None, tokens: int | None = None, block_size: int | None = None
) -> StepSizes:
    spec = WorkerLaunch(
        boot_id=0,
        runtime_dir=Path(),
        log_level="info",
        config=WorkerConfig(block_size=block_size),
        model=ModelFiles(path=Path(), name="none"),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
    )
    return choose_sizes(spec, torch.device(device))


def test_sizes_suit_the_device_and_each_other() -> None:
    """What is given is kept; of what is not, nothing contradicts it."""
    assert sizes("cpu") == StepSizes(16, 64, 2048)
    assert sizes("cuda") == StepSizes(64, 256, 4352)
    assert sizes("cuda", tokens=100) == StepSizes(64, 100, 100)
    assert sizes("cpu", seqs=4000) == StepSizes(16, 4000, 4000)
    assert sizes("cpu", seqs=3, tokens=7, block_size=5) == StepSizes(5, 3, 7)
    with pytest.raises(StartupError, match="one of 16, 32, 64, 128, 256, got 48"):
        sizes("cuda", block_size=48)


@pytest.mark.parametrize("largest", [1, 5, 16, 17, 64, 100, 256, 1000, 3000])
def test_every_batch_has_a_graph(largest: int) -> None:
    """Sizes ascend to the largest batch, exact up to 16, and waste at most a quarter above."""
    chosen = decode_graph_sizes(None, largest)
    assert list(chosen) == sorted(set(chosen)) and chosen[-1] == largest
    for rows in range(1, largest + 1):
        size = padded_size(chosen, rows)
        assert rows <= size <= largest
        assert size == rows if rows <= 16 else size < 1.5 * rows


def test_given_graph_sizes() -> None:
    """In any order; the largest batch joins them and larger ones are left out."""
    assert decode_graph_sizes(graph_sizes("8,2,400,2"), 30) == (2, 8, 30)
    for text in ("", "1,x", "0,4"):
        with pytest.raises(ValueError, match="--cuda-graph-sizes"):
            WorkerConfig(cuda_graph_sizes=text)


def plan(total: int, used: int, **flags: Any) -> CudaMemoryPlan:
    """Of a GPU with these MiB and blocks of one MiB for 64 tokens."""
    measured = Measured(
        total_bytes=total * MIB,
        used_bytes=used * MIB,
        weight_bytes=used * MIB // 2,
        buffer_bytes=used * MIB // 4,
        activation_bytes=10 * MIB,
        graph_bytes=30 * MIB,
    )
    return plan_cuda_memory(
        WorkerConfig(**flags),
        measured,
        block_size=64,
        bytes_per_block=MIB,
        max_num_seqs=4,
        model_len_wanted=flags.get("max_model_len") or 1000 * 64,
    )


def test_the_pool_takes_what_is_left() -> None:
    """Of the share of the GPU, after all that was measured and a reserve."""
    left = 900 - 200 - 10 - 30 - RESERVE_BYTES // MIB
    sized = plan(1000, 200, gpu_memory_utilization=0.9, num_kv_blocks=left - 1)
    assert sized.num_blocks == left - 1  # with the spare block all of it
    with pytest.raises(StartupError, match="does not fit"):
        plan(1000, 200, gpu_memory_utilization=0.9, num_kv_blocks=left)
    table = cuda_memory_table(sized, 20 * MIB, 77 * MIB)
    assert "reduced from 64,000" in table and "77.0 MiB  of 1,000.0 MiB" in table


def test_the_default_pool_fits_with_its_spare_block() -> None:
    """Without a size given nothing is refused that can be had."""
    left = 900 - 200 - 10 - 30 - RESERVE_BYTES // MIB
    assert plan(1000, 200).num_blocks == left - 1
    assert plan(10_000, 200, max_model_len=640).num_blocks == 4 * 10  # all that can be filled
    with pytest.raises(StartupError, match="does not fit"):
        plan(400, 300)
    with pytest.raises(StartupError, match=r"needs 1,000\.0 MiB of KV"):
        plan(1000, 200, max_model_len=64_000)


def test_warm_up_and_the_largest_step_leave_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """All seats and blocks are free behind it, in a pool of any size."""
    use_references(monkeypatch)
    decoder = device_decoder(tiny_model("qwen3", num_heads=2, num_kv_heads=1, num_layers=1), 64)
    for num_blocks, seqs, tokens in ((12, 4, 48), (1, 1, 8)):
        step_sizes = StepSizes(16, seqs, tokens)
        model = build_model(decoder, step_sizes, 64)
        assert model.forward(largest_prefill(model, step_sizes, 64)).shape == (1, 301)
        model.allocate_kv(num_blocks)
        runner = build_runner(model, step_sizes, min(64, num_blocks * 16))
        warm_up(runner, step_sizes, num_blocks, min(64, num_blocks * 16))
        warm_products(model, tokens)
        assert runner.num_in_flight == 0 and len(runner._states) == 0


def test_memory_of_graphs_is_measured_without_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture empties the cache: when that was counted as used before, graphs had less than 0."""
    cached, graphs = [300 * MIB], [0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cached.__setitem__(0, 0))
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda _: (1000 * MIB - cached[0] - graphs[0], 1000 * MIB)
    )
    device = torch.device("cuda", 0)
    before = free_bytes(device)
    torch.cuda.empty_cache()
    graphs[0], cached[0] = 20 * MIB, 100 * MIB
    assert before - free_bytes(device) == 20 * MIB


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """One clear line, exit code 2."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with WorkerProcess(save_tiny(tiny_model("llama"), tmp_path), device="cuda") as worker:
        failure = worker.report()
        assert isinstance(failure, ProcessFailed)
        assert "--device cuda" in failure.reason and "--device cpu" in failure.reason
        assert worker.end()[0] == 2


@pytest.mark.parametrize("largest", [1, 2, 31, 100, 4352, 50_000])
def test_products_are_warmed_over_the_whole_range(largest: int) -> None:
    """From one token to the largest step, odd numbers too, and not more than takes a second."""
    found = product_sizes(largest)
    assert found[0] == 1 and found[-1] == largest and found == sorted(set(found))
    assert len(found) <= 300
    assert all(b - a <= max(32, largest // 100) for a, b in itertools.pairwise(found))
    assert largest < 100 or any(n % 2 for n in found[1:])
