"""Forecast, watermark and greedy admission in the real server, and what `what-if` says of them.

Owns a measurement, not a test: run it by hand on a quiet machine. Each policy serves each point
with a server and a trace of its own, a burst of streams of exact lengths; then the command
`cearx replay what-if` is asked about each ordered pair of policies on the traces.

The points are C64/I256/O1024 and C16/I256/O4096 where a card of 32 GB holds 8B weights in 16 bits:
11.4 GB are left for KV (`tests/support/step_times.py`), at 147,456 bytes a token room for
POOL_TOKENS = 77,311 tokens. The pool of any other model gets as many tokens, so that the requests
crowd it in the same way: with Qwen3-0.6B, whose token takes 114,688 bytes, 8.9 GB. On a GPU a block
has 64 tokens (1,207 blocks); `--block-size 256 --points C64/I257/O1024,C16/I257/O4096` has as many
blocks as that card had, 301, so that watermark's reserve of 64 blocks weighs as much, too.

On the CPU everything is scaled by block size / 256: a tiny model with random weights, 301 blocks,
and prompts and answers of as many blocks. Each policy takes less than a minute on two cores.

    python tests/benchmarks/admission_in_engine.py --device cuda --model qwen3_0.6b
    python tests/benchmarks/admission_in_engine.py --device cpu --points C64/I65/O256 --repeats 3
"""

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
import msgspec

sys.path.insert(0, str(Path(__file__).parents[2] / ".typing"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from frontend_process import write_model
from make_dummy_model import find_config, make_dummy_model
from server_process import Server, serving
from step_times import pool_blocks

from cearx.frontend.bench.endpoint import Sampling, find_endpoint
from cearx.frontend.bench.fleet import auto_num_clients, open_fleet
from cearx.frontend.bench.matrix import MatrixPoint, parse_points
from cearx.frontend.bench.metrics import Figures
from cearx.frontend.bench.random_prompts import TokenPrompts
from cearx.frontend.bench.run_plan import RunRequest, execute
from cearx.replay.stats import compute
from cearx.replay.trace import Trace
from cearx.replay.what_if import WhatIf

POLICIES = ("forecast", "watermark", "greedy")
POOL_TOKENS = pool_blocks(1)
POINT_BLOCK = 256
"""Tokens a block at the points."""
POINTS = {"cpu": "C64/I65/O256,C16/I65/O1024", "cuda": "C64/I256/O1024,C16/I256/O4096"}
TOKEN_IDS = (3, 250)
"""Prompts are drawn from these: every vocabulary has them."""
ALIKE = 0.05
"""Policies that differ by less, or whose runs overlap, are not told apart."""
READY_TIMEOUT_S = 300
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Run:
    """One policy's burst."""

    trace: Path
    clients: Figures
    engine_rate: float
    """Output tokens a second by the trace, which `what-if` is held against."""
    num_preemptions: int
    num_recomputed_tokens: int

    def line(self) -> str:
        latencies = self.clients.latencies
        cells = "".join(f"{latencies[f'{name}_ms']:>10.1f}" for name in LATENCIES)
        return (
            f"{self.clients.output_throughput:>9.0f}{self.engine_rate:>9.0f}"
            f"{self.num_preemptions:>8}{self.num_recomputed_tokens:>11}{cells}"
        )


LATENCIES = ("mean_ttft", "p99_ttft", "median_itl", "p99_itl", "max_itl")
HEADING = (
    f"{'policy':<11}{'tok/s':>9}{'engine':>9}{'preempt':>8}{'recomputed':>11}"
    f"{'TTFT mean':>10}{'p99':>10}{'ITL p50':>10}{'p99':>10}{'max ms':>10}"
)


async def burst(server: Server, point: MatrixPoint, seed: int) -> Figures:
    """Every stream at once, as `cearx bench matrix` does it, without a request before."""
    num_clients = auto_num_clients(point.concurrency, len(os.sched_getaffinity(0)))
    prompts = TokenPrompts(*TOKEN_IDS, seed)
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    async with httpx.AsyncClient(base_url=server.url) as http, open_fleet(num_clients) as fleet:
        endpoint = find_endpoint(http, "completions", server.name, sampling, 600)
        requests = [
            RunRequest(
                body=endpoint.body(prompts.token_ids(point.input_len), point.output_len),
                input_len=point.input_len,
                output_len=point.output_len,
            )
            for _ in range(point.concurrency)
        ]
        outcome = await execute(fleet, endpoint.target, requests)
    if not outcome.is_ok:
        raise SystemExit(f"{point}: {outcome.figures.errors}")
    return outcome.figures


def serve(
    options: argparse.Namespace, model: Path, policy: str, point: MatrixPoint, trace: Path
) -> Run:
    """One server, one burst; answers its figures."""
    flags = ["--load-format", "dummy", "--admission", policy, "--no-enable-prefix-caching"]
    flags += ["--device", options.device, "--max-num-seqs", str(point.concurrency)]
    flags += ["--num-kv-blocks", str(options.num_kv_blocks)]
    flags += ["--block-size", str(options.block_size)]
    flags += ["--max-model-len", str(point.input_len + point.output_len)]
    flags += ["--num-threads", "1"] if options.device == "cpu" else []
    flags += options.serve_args.split()
    with serving(str(model), *flags, trace=trace, ready_timeout_s=READY_TIMEOUT_S) as server:
        clients = asyncio.run(burst(server, point, options.seed))
        assert server.stop() == 0
    run = compute(Trace.open(trace), "wait").run
    return Run(
        trace=trace,
        clients=clients,
        engine_rate=run.num_output_tokens / run.duration_us * 1e6,
        num_preemptions=run.num_preemptions,
        num_recomputed_tokens=run.num_recomputed_tokens,
    )


def ask(trace: Path, policy: str) -> WhatIf:
    """The answer of `cearx replay what-if`; raises SystemExit when there is none."""
    command = [sys.executable, "-P", "-m", "cearx.core.cli", "replay", "what-if", str(trace)]
    command += ["--set", f"admission={policy}", "--arrivals", "closed", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode not in (0, 4):  # 4: it refuses
        raise SystemExit(f"{' '.join(command)}: exit {answer.returncode}\n{answer.stderr}")
    return msgspec.json.decode(answer.stdout, type=WhatIf)


def ask_all(traces: Sequence[tuple[Path, str]]) -> list[WhatIf]:
    """Each trace about a policy, as many at a time as there are cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda pair: ask(*pair), traces))


def verdict(said: float, mine: list[float], others: list[float]) -> str:
    """What became of a predicted rate: runs of one policy differ by some percent as well."""
    before, was = median(mine), median(others)
    do_overlap = min(mine) <= max(others) and min(others) <= max(mine)
    if (len(mine) > 1 and do_overlap) or abs(was / before - 1) < ALIKE:
        return "within noise"
    return "sign holds" if (said > before) == (was > before) else "SIGN WRONG"


def print_ratios(point: MatrixPoint, runs: dict[str, list[Run]]) -> None:
    print(f"\n{point}, output tokens a second as the clients saw them\n{'policy':<11}{'tok/s':>9}")
    middle = {}
    for policy, all_runs in runs.items():
        rates = [run.clients.output_throughput for run in all_runs]
        middle[policy] = median(rates)
        print(f"{policy:<11}{middle[policy]:>9.0f}  {min(rates):.0f}-{max(rates):.0f}")
    for policy, other in itertools.combinations(runs, 2):
        print(f"{policy} / {other} {middle[policy] / middle[other]:.3f}")


def print_what_if(point: MatrixPoint, runs: dict[str, list[Run]]) -> None:
    """Predicted and measured rates of the engine, for each ordered pair of policies."""
    pairs = list(itertools.permutations(runs, 2))
    asked = [(run.trace, other) for policy, other in pairs for run in runs[policy]]
    answers = iter(ask_all(asked))
    title = f"\n{point}, what-if"
    print(f"{title}\n{'trace of':<11}{'what-if':<11}{'predicted':>10}{'measured':>10}{'error':>8}")
    for policy, other in pairs:
        results = [next(answers) for _ in runs[policy]]
        mine = [run.engine_rate for run in runs[policy]]
        others = [run.engine_rate for run in runs[other]]
        measured = median(others)
        said = [
            r.changed.num_output_tokens / r.changed.duration_us * 1e6
            for r in results
            if r.changed is not None
        ]
        judged = [e for r in results for e in r.calibration if e.is_judged]
        worst = max(judged, key=lambda e: abs(e.percent))
        note = f"calibration {worst.percent:+.1f} % at {worst.name}"
        start = f"{policy:<11}{other:<11}"
        if not said:
            print(f"{start}{'-':>10}{measured:>10.0f}{'-':>8}  REFUSED, {note}")
            continue
        rate = median(said)
        if len(said) < len(results):
            note += f", {len(results) - len(said)} of {len(results)} refused"
        error = 100 * (rate / measured - 1)
        text = verdict(rate, mine, others)
        print(f"{start}{rate:>10.0f}{measured:>10.0f}{error:>+7.1f}%  {text}; {note}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--model",
        help="qwen3_0.6b, qwen3_8b, the path of a config.json, or a model's folder with a"
        " tokenizer; weights are random (default: a tiny model on the CPU, qwen3_0.6b on CUDA)",
    )
    parser.add_argument("--points", help="C64/I256/O1024,... (default: those of the docstring)")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument(
        "--num-kv-blocks",
        type=int,
        help=f"default: {POOL_TOKENS} tokens, on the CPU times block size / {POINT_BLOCK}",
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--serve-args", default="", help="more flags of cearx serve, one text")
    parser.add_argument("--output", type=Path, help="folder that keeps the traces")
    options = parser.parse_args()
    options.points = parse_points(options.points or POINTS[options.device])
    if options.num_kv_blocks is None:
        is_scaled = options.device == "cpu"
        options.num_kv_blocks = POOL_TOKENS // (POINT_BLOCK if is_scaled else options.block_size)
    return options


def model_folder(options: argparse.Namespace, folder: Path) -> Path:
    """As the flags name it, made where it is none yet."""
    name = options.model or ("qwen3_0.6b" if options.device == "cuda" else None)
    if name is None:
        folder.mkdir()
        write_model(folder)
        (folder / "config.json").write_bytes(msgspec.json.encode(TINY))
        return folder
    if (Path(name) / "tokenizer.json").is_file():
        return Path(name)
    return make_dummy_model(find_config(name), folder)


def main() -> None:
    options = parse_options()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2] / ".typing"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        traces = options.output or scratch
        model = model_folder(options, scratch / "model")
        tokens = options.num_kv_blocks * options.block_size
        print(f"{options.num_kv_blocks} blocks of {options.block_size}: {tokens} tokens of KV")
        warm_up = MatrixPoint(1, options.block_size, options.block_size)
        serve(options, model, "greedy", warm_up, scratch / "warm-up")  # kernels get compiled
        for point in options.points:
            print(f"\n{point}\n{HEADING}")
            runs: dict[str, list[Run]] = {policy: [] for policy in options.policies.split(",")}
            for repeat, policy in itertools.product(range(options.repeats), runs):
                name = f"{point}-{policy}-{repeat}".replace("/", "-")
                run = serve(options, model, policy, point, traces / name)
                runs[policy].append(run)
                print(f"{policy:<11}{run.line()}", flush=True)
            print_ratios(point, runs)
            print_what_if(point, runs)


if __name__ == "__main__":
    main()
