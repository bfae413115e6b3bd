"""Checks and times the CUDA worker on a GPU: tokens of all ways to run, and a step's anatomy.

Owns a measurement, not a test: run it by hand on a machine with a GPU, without HTTP and sockets.
First a small model in bfloat16: steps that are launched kernel by kernel, captured and pipelined
must agree, and its logits must be those of the CPU within bfloat16's rounding. Then each model's
start-up, decode steps, prefills and kernels. Results are printed and written to --output as JSON.

    python tests/gpu/check_worker.py --models qwen3_8b qwen3_0.6b --output check.json
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2] / ".typing"))

import numpy as np
import torch

from cearx.core.block_hash import root_hash
from cearx.core.config import ModelFiles, SchedulerConfig, WorkerConfig, WorkerLaunch
from cearx.core.engine import Engine
from cearx.core.event_log import NullLog
from cearx.core.events import Admission, BlocksGranted, PrefillChunk, StepPlan
from cearx.core.identifiers import BlockId, RequestId, RequestKey, StepId
from cearx.core.messages import ExecuteStep, NewRequest, SamplingParams, Submit, pack_tokens
from cearx.worker.attention import AttentionMetadata
from cearx.worker.cuda.decoder import DeviceDecoder
from cearx.worker.cuda.graph_runner import StepGraphs, decode_graph_sizes
from cearx.worker.cuda.padded_steps import padded_step_sizes
from cearx.worker.cuda.runner import CudaRunner
from cearx.worker.cuda.start import StartedCuda, build_model, build_runner, start_cuda
from cearx.worker.cuda.warm_up import warm_up
from cearx.worker.device import StepSizes, choose_sizes
from cearx.worker.kv_cache import KVCache
from cearx.worker.model_config import ModelConfig, RopeConfig
from cearx.worker.models.registry import find_model
from cearx.worker.tensor_parallel import SingleRank
from cearx.worker.weights import DummyWeights, fill_slots

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0)
SECRET = bytes(32)
SMALL = {
    "tiny": {"hidden_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "medium": {"hidden_size": 1024, "num_layers": 8, "num_heads": 16, "num_kv_heads": 8},
}
STEP_SHAPES = [(1, 32), (4, 32), (16, 32), (64, 32), (1, 256), (16, 256), (64, 256)]
"""(requests, tokens of each when the timing begins)."""
PREFILLS = [(1, 32), (1, 4096), (4, 4096), (64, 256)]
PROFILED = (1, 16, 64)
WARM_STEPS, TIMED_STEPS = 8, 60


def small_config(name: str) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        head_dim=64,
        intermediate_size=2 * SMALL[name]["hidden_size"],
        vocab_size=32000,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        tie_word_embeddings=False,
        qk_norm=True,
        **SMALL[name],
    )


def generate(
    runner: CudaRunner,
    config: SchedulerConfig,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    max_tokens: int,
) -> tuple[list[list[int]], int]:
    """Tokens of all prompts under the real scheduler, and the number of preemptions."""
    engine = Engine(config, SECRET, NullLog())
    tokens: list[list[int]] = [[] for _ in prompts]
    for key, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        refused = engine.submit(
            0,
            Submit(
                request_key=RequestKey(key),
                token_ids=pack_tokens(prompt),
                block_hashes=(),
                cache_root=root_hash(SECRET, None),
                max_tokens=max_tokens,
                sampling=sampling,
            ),
            0,
        )
        assert refused is None, refused
    preemptions = 0
    while engine.wants_step or runner.num_in_flight:
        while engine.wants_step:
            step = engine.next_step()
            if step is not None:
                preemptions += len(step.plan.preempted)
                runner.launch(step)
        result = runner.collect()
        if result is not None:
            for outputs in engine.finish_step(result).values():
                for output in outputs:
                    tokens[output.request_key].extend(output.token_ids)
    runner.execute(ended_step(range(len(prompts))))
    return tokens, preemptions


def ended_step(ended: Sequence[int]) -> ExecuteStep:
    plan = StepPlan(
        step_id=StepId(0), decodes=(), chunks=(), granted=(), admitted=(), preempted=(), waits=()
    )
    return ExecuteStep(plan=plan, new_requests=(), ended=tuple(map(RequestId, ended)))


def prefill_step(count: int, length: int, block_size: int, spare_tokens: int) -> ExecuteStep:
    """Whole prompts of requests 0, 1, ... with blocks for further tokens."""
    blocks_each = -(-(length + spare_tokens) // block_size)
    rng = np.random.default_rng(count * 10_000 + length)
    ids = [RequestId(i) for i in range(count)]
    plan = StepPlan(
        step_id=StepId(0),
        decodes=(),
        chunks=tuple(
            PrefillChunk(request_id=i, start=0, num_tokens=length, samples=True) for i in ids
        ),
        granted=tuple(
            BlocksGranted(
                request_id=i,
                block_ids=tuple(BlockId(i * blocks_each + n) for n in range(blocks_each)),
            )
            for i in ids
        ),
        admitted=tuple(Admission(request_id=i, num_cached_tokens=0) for i in ids),
        preempted=(),
        waits=(),
    )
    new = tuple(
        NewRequest(
            request_id=i,
            token_ids=pack_tokens(rng.integers(0, 30_000, length).tolist()),
            sampling=GREEDY,
        )
        for i in ids
    )
    return ExecuteStep(plan=plan, new_requests=new, ended=())


def decode_step(count: int) -> ExecuteStep:
    plan = StepPlan(
        step_id=StepId(0),
        decodes=tuple(RequestId(i) for i in range(count)),
        chunks=(),
        granted=(),
        admitted=(),
        preempted=(),
        waits=(),
    )
    return ExecuteStep(plan=plan, new_requests=(), ended=())


def small_runner(
    decoder: DeviceDecoder,
    config: SchedulerConfig,
    steps: Literal["eager", "launched", "graph"],
    kv_dtype: torch.dtype | None,
) -> CudaRunner:
    """Steps of their own size, or those that graphs hold, kernel by kernel or captured."""
    sizes = StepSizes(config.block_size, config.max_num_seqs, config.max_num_batched_tokens)
    model = build_model(decoder, sizes, config.max_model_len, kv_dtype)
    model.allocate_kv(config.num_blocks)
    runner = build_runner(model, sizes, config.max_model_len)
    if steps == "eager":
        return runner
    warm_up(runner, sizes, config.num_blocks, config.max_model_len)
    stream = torch.cuda.current_stream()
    graphs = StepGraphs(decode_graph_sizes((1, 2, 4, 8), sizes.max_num_seqs), stream)
    padded = runner.padded_steps(padded_step_sizes(sizes.max_num_batched_tokens))
    if steps == "graph":
        graphs.capture(model.decode, lambda *_: None)
        padded.capture(stream, lambda *_: None)
    else:
        graphs.replay = model.decode  # type: ignore[method-assign]
    runner.graphs, runner.padded = graphs, padded
    return runner


def check_small(
    name: str, device: torch.device, *, fp8: bool = False, kv_dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Tokens of all ways to run one model, and its logits against the CPU's in float32.

    With `fp8` the device's weights are rounded, with `kv_dtype` its keys and values are of that
    type; the CPU's are exact.
    """
    config = small_config(name)
    decoder = DeviceDecoder(config, 1024, torch.bfloat16, device, fp8=fp8)
    cpu_model = find_model(config.architecture)(config, torch.float32, SingleRank())
    slots = cpu_model.weight_slots()
    source = DummyWeights(slots, 0)
    for target in (slots, decoder.weight_slots()):
        fill_slots(target, source, lambda _: False, lambda *_: None)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 30_000, int(rng.integers(1, 300))).tolist() for _ in range(24)]
    greedy = [GREEDY] * len(prompts)
    mixed = [
        (GREEDY, SamplingParams(seed=i), SamplingParams(seed=i, top_k=20, top_p=0.9))[i % 3]
        for i in range(len(prompts))
    ]
    found: dict[str, Any] = {}
    roomy = {"num_blocks": 400, "pipeline_depth": 2}
    runs: dict[str, tuple[dict[str, int], Literal["eager", "launched", "graph"]]] = {
        "eager": ({**roomy, "pipeline_depth": 1}, "eager"),
        "launched": ({**roomy, "pipeline_depth": 1}, "launched"),
        "graph": ({**roomy, "pipeline_depth": 1}, "graph"),
        "pipelined": (roomy, "graph"),
        "preempting": ({**roomy, "num_blocks": 40}, "graph"),
    }
    tokens: dict[str, dict[str, list[list[int]]]] = {}
    for run, (options, steps) in runs.items():
        plan = SchedulerConfig(
            block_size=16 if run == "preempting" else 64,
            max_model_len=512,
            max_num_seqs=12,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
            admission="greedy",
            **options,  # type: ignore[arg-type]
        )
        runner = small_runner(decoder, plan, steps, kv_dtype)
        tokens[run] = {}
        for kind, params in (("greedy", greedy), ("mixed", mixed)):
            tokens[run][kind], preempted = generate(runner, plan, prompts, params, 40)
            found[f"{run} preemptions"] = preempted
        del runner
        torch.cuda.empty_cache()
    # The same kernels on the same sizes must give the same tokens; other sizes round otherwise.
    pairs = [("graph", "launched"), ("pipelined", "graph"), ("preempting", "graph")]
    for run, other in [*pairs, ("graph", "eager")]:
        for kind in ("greedy", "mixed"):
            both = zip(tokens[other][kind], tokens[run][kind], strict=True)
            equal = [common_prefix(a, b) for a, b in both]
            found[f"{run} = {other}, {kind}"] = f"{sum(n == 40 for n in equal)}/{len(equal)}"
            found[f"{run} = {other} first difference, {kind}"] = min(equal)
    found["logits"] = compare_logits(decoder, cpu_model, config, prompts[:4], kv_dtype)
    return found


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


@torch.inference_mode()
def compare_logits(
    decoder: DeviceDecoder,
    cpu_model: Any,
    config: ModelConfig,
    prompts: Sequence[list[int]],
    kv_dtype: torch.dtype | None,
) -> dict[str, float]:
    """Of each prompt's last token: the device's in bfloat16 and the CPU's in float32."""
    sizes = StepSizes(64, 4, 2048)
    model = build_model(decoder, sizes, 512, kv_dtype)
    model.allocate_kv(64)
    runner = build_runner(model, sizes, 512)
    errors, agree = [], 0
    for prompt in prompts:
        length = len(prompt)
        step = prefill_step(1, length, 64, 2)
        new = step.new_requests[0]
        packed = NewRequest(
            request_id=new.request_id, token_ids=pack_tokens(prompt), sampling=GREEDY
        )
        runner.execute(ExecuteStep(plan=step.plan, new_requests=(packed,), ended=()))
        device_V = model.logits(1)[0].float().cpu()
        runner.execute(ended_step([0]))
        kv_cache = KVCache(config, -(-length // 16), 16, torch.float32)
        metadata = AttentionMetadata(
            num_decodes=0,
            cu_seqlens_q=torch.tensor([0, length]),
            seq_lens=torch.tensor([length]),
            block_tables=torch.arange(-(-length // 16))[None],
            slot_mapping=torch.arange(length),
        )
        cpu_V = cpu_model.forward(
            torch.tensor(prompt),
            torch.arange(length),
            kv_cache,
            metadata,
            torch.tensor([length - 1]),
        )[0]
        errors.append(float((device_V - cpu_V).norm() / cpu_V.norm()))
        agree += int(device_V.argmax() == cpu_V.argmax())
    return {"relative error": round(max(errors), 5), "same argmax": agree / len(prompts)}


def start_model(
    name: str,
    device: torch.device,
    runtime_dir: Path,
    max_num_seqs: int | None = None,
    **flags: Any,
) -> tuple[StartedCuda, StepSizes]:
    spec = WorkerLaunch(
        boot_id=0,
        runtime_dir=runtime_dir,
        log_level="warning",
        config=WorkerConfig(load_format="dummy", device="cuda", **flags),
        model=ModelFiles(path=ROOT / "tests/benchmarks/models" / name, name=name),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=None,
    )
    sizes = choose_sizes(spec, device)
    return start_cuda(spec, sizes, device, lambda *_: None), sizes


def wait(runner: CudaRunner) -> None:
    while runner.collect() is None:
        pass


def time_decodes(runner: CudaRunner, count: int, context: int, block_size: int) -> dict[str, Any]:
    """Two steps in flight, as the core keeps them; the batch does not change."""
    spare = WARM_STEPS + 2 * TIMED_STEPS + 4
    runner.execute(prefill_step(count, context, block_size, spare))
    step = decode_step(count)
    launch_us: list[float] = []
    collect_us: list[float] = []

    def run(steps: int) -> float:
        runner.launch(step)
        begin = time.perf_counter()
        for _ in range(steps):
            t0 = time.perf_counter()
            runner.launch(step)
            launch_us.append((time.perf_counter() - t0) * 1e6)
            while True:
                t0 = time.perf_counter()
                if runner.collect() is not None:
                    break
            collect_us.append((time.perf_counter() - t0) * 1e6)
        seconds = time.perf_counter() - begin
        wait(runner)
        return seconds

    run(WARM_STEPS)
    launch_us.clear()
    collect_us.clear()
    seconds = run(TIMED_STEPS)
    found: dict[str, Any] = {
        "ms a step": round(seconds / TIMED_STEPS * 1e3, 4),
        "launch us": round(statistics.median(launch_us), 1),
        "collect us": round(statistics.median(collect_us), 1),
    }
    if count in PROFILED and context == 32:
        found |= profile(run)
    runner.execute(ended_step(range(count)))
    return found


def profile(run: Callable[[int], float]) -> dict[str, Any]:
    """Busy share of the GPU over steps, and microseconds a step of each kernel."""
    steps = 20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run(steps)
        torch.cuda.synchronize()
    spans = sorted(device_spans(profiler))
    if not spans:
        return {"busy": None}
    busy, end = 0.0, spans[0][0]
    for begin, duration, _ in spans:
        stop = begin + duration
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    wall = end - spans[0][0]
    sums: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for _, duration, name in spans:
        sums[name[:60]] += duration
        calls[name[:60]] += 1
    return {
        "busy": round(busy / wall, 4),
        "kernels": {
            name: {
                "us a step": round(us / (steps + 1), 2),
                "calls a step": round(calls[name] / (steps + 1), 1),
                "us a call": round(us / calls[name], 2),
            }
            for name, us in sums.most_common(14)
        },
    }


def device_spans(profiler: Any) -> Iterator[tuple[float, float, str]]:
    """(begin, duration, name) of everything that ran on the GPU, in microseconds."""
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            yield event.time_range.start, event.time_range.elapsed_us(), event.name


def time_prefill(runner: CudaRunner, count: int, length: int, block_size: int) -> dict[str, float]:
    """Milliseconds from the launch to the tokens, and those that the launch alone takes."""
    step = prefill_step(count, length, block_size, 2)
    times, launches = [], []
    for _ in range(4):
        begin = time.perf_counter()
        runner.launch(step)
        launches.append(time.perf_counter() - begin)
        wait(runner)
        times.append(time.perf_counter() - begin)
        runner.execute(ended_step(range(count)))
    return {"ms": round(min(times) * 1e3, 3), "launch ms": round(min(launches) * 1e3, 3)}


def time_model(name: str, device: torch.device, out: Path) -> dict[str, Any]:
    begin = time.perf_counter()
    started, sizes = start_model(name, device, out.parent)
    found: dict[str, Any] = {
        "start-up s": round(time.perf_counter() - begin, 1),
        "stages s": started.stage_seconds,
        "memory": started.memory_table.splitlines(),
    }
    print("\n".join(found["memory"]), found["stages s"], flush=True)
    for count, length in PREFILLS:
        if count * length > sizes.max_num_batched_tokens:
            continue
        found[f"prefill {count}x{length}"] = time_prefill(
            started.runner, count, length, sizes.block_size
        )
        print(name, "prefill", count, length, found[f"prefill {count}x{length}"], flush=True)
    for count, context in STEP_SHAPES:
        key = f"decode C{count} context {context}"
        found[key] = time_decodes(started.runner, count, context, sizes.block_size)
        brief = {k: v for k, v in found[key].items() if k != "kernels"}
        print(name, key, brief, flush=True)
    found["late compiles"] = started.compile_watch.num_late
    started.compile_watch.disarm()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["qwen3_8b", "qwen3_0.6b"])
    parser.add_argument("--small", nargs="*", default=["tiny", "medium"])
    parser.add_argument("--output", type=Path, default=Path("check_worker.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("check_worker: no CUDA device")
        return 2
    device = torch.device("cuda", 0)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    for name in arguments.small:
        begin = time.perf_counter()
        results[name] = check_small(name, device)
        print(name, f"{time.perf_counter() - begin:.1f} s", results[name], flush=True)
        arguments.output.write_text(json.dumps(results, indent=1))
    for name in arguments.models:
        results[name] = time_model(name, device, arguments.output)
        arguments.output.write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()
    for name in arguments.models:
        for key, value in results[name].items():
            if isinstance(value, dict) and "kernels" in value:
                print(f"{name} {key}: {value['ms a step']} ms, busy {value['busy']}")
                for kernel, row in value["kernels"].items():
                    print(f"  {row['us a step']:>9} us {row['calls a step']:>6} x  {kernel}")
        print(name, "late compiles", results[name]["late compiles"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
