"""The type of keys and values: what each device and model may have, and what a block then takes."""

from typing import Any

import pytest
import torch
from device_runners import device_decoder, device_runner, use_references
from local_engine import LocalEngine
from tiny_models import save_tiny, tiny_model
from worker_process import WorkerProcess

from cearx.core.child import StartupError
from cearx.core.config import WorkerConfig
from cearx.core.messages import ProcessFailed
from cearx.kernels.paged_kv import FP8
from cearx.worker.device import choose_device
from cearx.worker.kv_cache import block_bytes, kv_type

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""NumPy, which the interpreter computes with, warns where a GPU's result is infinite as well."""


def test_spellings_and_defaults() -> None:
    """As vLLM spells them; the default is the model's type."""
    for dtype in (torch.bfloat16, torch.float16):
        assert kv_type("auto", dtype, CUDA) == dtype
        assert kv_type("fp8", dtype, CUDA) == kv_type("fp8_e4m3", dtype, CUDA) == FP8
    assert kv_type("bf16", torch.bfloat16, CPU) == kv_type("bfloat16", torch.bfloat16, CUDA)
    assert kv_type("auto", torch.float32, CPU) == torch.float32


def test_what_no_kernel_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 on the CPU and on old GPUs, and 16 bits of another kind than the model's."""
    with pytest.raises(ValueError, match="fp8_e4m3 is for CUDA, got --device cpu"):
        WorkerConfig(kv_cache_dtype="fp8_e4m3", device="cpu")
    with pytest.raises(StartupError, match="fp8 needs a GPU"):
        kv_type("fp8", torch.float32, CPU)
    with pytest.raises(StartupError, match="bf16 for a model that computes in float16"):
        kv_type("bf16", torch.float16, CUDA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    with pytest.raises(StartupError, match=r"--kv-cache-dtype fp8 needs .* has 8\.6"):
        choose_device(WorkerConfig(kv_cache_dtype="fp8"))
    assert choose_device(WorkerConfig(kv_cache_dtype="bf16")).type == "cuda"


def test_the_cpu_worker_says_so(tmp_path: Any) -> None:
    """One line and exit code 2 where 'auto' finds no GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    folder = save_tiny(tiny_model("llama"), tmp_path)
    with WorkerProcess(folder, device="auto", kv_cache_dtype="fp8") as worker:
        failure = worker.report()
        assert isinstance(failure, ProcessFailed)
        assert "--kv-cache-dtype fp8 needs a GPU" in failure.reason
        assert worker.end()[0] == 2


def test_tokens_with_fp8_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block takes half of 16 bits, and its rounding moves logits without breaking a step."""
    use_references(monkeypatch)
    decoder = device_decoder(
        tiny_model("qwen3", num_heads=2, num_kv_heads=1, num_layers=2, head_dim=16), 64
    )
    assert 2 * block_bytes(decoder.config, 16, FP8) == block_bytes(
        decoder.config, 16, torch.bfloat16
    )
    seen: dict[torch.dtype, list[torch.Tensor]] = {torch.float32: [], FP8: []}
    for kind, logits in seen.items():

        def make(config: Any, kind: torch.dtype = kind, logits: list[torch.Tensor] = logits) -> Any:
            runner = device_runner(decoder, config, kind)
            assert all(layer.dtype == kind for layer in runner._model.kv_layers_B2KPD)
            sample = runner._model.sample

            def record(logits_RV: torch.Tensor, *rest: Any) -> torch.Tensor:
                logits.append(logits_RV.clone())
                return sample(logits_RV, *rest)

            monkeypatch.setattr(runner._model, "sample", record)
            return runner

        engine = LocalEngine(
            None,  # type: ignore[arg-type]
            decoder.config,
            make_runner=make,
            num_blocks=8,
            budget=9,
            max_num_seqs=2,
        )
        engine.generate([[5, 9, 200, 31, 8, 77, 4, 12, 6, 30, 2]], 1)
    exact, rounded = (torch.cat(logits) for logits in seen.values())
    error = float((rounded - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1, f"relative error of the logits {error}"
