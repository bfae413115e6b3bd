"""Forecast, watermark and greedy admission in the real server, and what `what-if` says of them.

Owns a measurement, not a test: run it by hand on a quiet machine. A tiny model with random weights
and a KV pool of 301 blocks, as many as a card of 32 GB has for 8B weights at 256 tokens a block;
prompts and answers have as many blocks as those of the points they stand for, so everything is
scaled by block size / 256 and a step costs about the same however many requests are in it. The
trace of each server is asked what the other policies would have done. Each command takes less than
three minutes on two cores.

    python tests/benchmarks/admission_in_engine.py --point c64 --block-size 64
    python tests/benchmarks/admission_in_engine.py --point c16 --block-size 64
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from frontend_process import write_model
from server_process import Server, serving

from cearx.core.config import SchedulerConfig
from cearx.replay.stats import compute
from cearx.replay.trace import Trace
from cearx.replay.what_if import WhatIf, what_if

POLICIES = ("forecast", "watermark", "greedy")
POOL_BLOCKS = 301
ALIKE = 0.05
"""Policies that differ by less, or whose runs overlap, are not told apart."""
POINT_BLOCK = 256
"""Tokens a block at the points."""
MODEL = {
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
class Point:
    """Clients with one request each at a time, and the blocks of a prompt and an answer."""

    concurrency: int
    output_blocks: int
    rounds: int

    def sizes(self, block_size: int) -> tuple[int, int]:
        """Tokens of prompt and answer; a prompt is one token longer than its block."""
        return block_size + 1, self.output_blocks * block_size


POINTS = {"c64": Point(64, 4, 1), "c16": Point(16, 16, 1)}


@dataclass(frozen=True)
class Run:
    tokens_per_s: float
    num_preemptions: int
    num_recomputed: int
    num_computed: int


async def burst(server: Server, point: Point, block_size: int) -> float:
    """Seconds until every client has had all its answers."""
    prompt_len, num_outputs = point.sizes(block_size)

    async def client_of(index: int, http: httpx.AsyncClient) -> None:
        for turn in range(point.rounds):
            body = {
                "model": server.name,
                "prompt": [3 + (index * 7 + turn + i) % 250 for i in range(prompt_len)],
                "max_tokens": num_outputs,
                "ignore_eos": True,
                "temperature": 0,
            }
            reply = await http.post("/v1/completions", json=body)
            reply.raise_for_status()
            assert reply.json()["usage"]["completion_tokens"] == num_outputs

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:
        start = time.perf_counter()
        await asyncio.gather(*(client_of(index, http) for index in range(point.concurrency)))
        return time.perf_counter() - start


def serve(
    model: Path, policy: str, point: Point, block_size: int, folder: Path
) -> tuple[Run, Path]:
    """One server, one burst; answers its figures and its trace."""
    flags = ["--load-format", "dummy", "--admission", policy, "--no-enable-prefix-caching"]
    flags += ["--num-kv-blocks", str(POOL_BLOCKS), "--block-size", str(block_size)]
    flags += ["--max-num-seqs", "256", "--max-num-batched-tokens", "8192"]
    flags += ["--max-model-len", str(sum(point.sizes(block_size))), "--num-threads", "1"]
    with serving(str(model), *flags, trace=folder) as server:
        asyncio.run(burst(server, point, block_size))
        assert server.stop() == 0
    run = compute(Trace.open(folder), "wait").run
    return (
        Run(
            tokens_per_s=run.num_output_tokens / run.duration_us * 1e6,
            num_preemptions=run.num_preemptions,
            num_recomputed=run.num_recomputed_tokens,
            num_computed=run.num_computed_tokens,
        ),
        folder,
    )


def ask(folder: Path, policy: str) -> WhatIf:
    trace = Trace.open(folder)
    config: SchedulerConfig = msgspec.structs.replace(trace.header.config, admission=policy)
    return what_if(trace, config, "closed", 10.0)


def verdict(said: float, mine: list[float], others: list[float]) -> str:
    """What became of a predicted rate: runs of one policy differ by some percent as well."""
    before, was = median(mine), median(others)
    do_overlap = min(mine) <= max(others) and min(others) <= max(mine)
    if do_overlap or abs(was / before - 1) < ALIKE:
        return "within noise"
    return "sign holds" if (said > before) == (was > before) else "SIGN WRONG"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--point", choices=POINTS, default="c64")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    point = POINTS[arguments.point]
    rates: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    predicted: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = folder / "model"
        model.mkdir()
        write_model(model)
        (model / "config.json").write_bytes(msgspec.json.encode(MODEL))
        print(f"{arguments.point}: {point}, {point.sizes(arguments.block_size)} tokens")
        warm_up = Point(point.concurrency, 1, 1)  # the first server compiles for this model
        serve(model, "greedy", warm_up, arguments.block_size, folder / "warm-up")
        for repeat in range(arguments.repeats):
            for policy in POLICIES:
                log = folder / f"{policy}-{repeat}"
                run, trace = serve(model, policy, point, arguments.block_size, log)
                rates[policy].append(run.tokens_per_s)
                print(policy, run, flush=True)
                fitted = ask(trace, policy)
                error, cost = fitted.error_percent, fitted.step_time
                print(
                    f"  {cost.fixed:.0f} us a step + {cost.decode:.1f} a decode, {error:.1f} % off"
                )
                for other in POLICIES:
                    if other != policy:
                        result = ask(trace, other)
                        if result.changed is None:
                            print(f"  what-if {other}: refused")
                            continue
                        figures = result.changed
                        rate = figures.num_output_tokens / figures.duration_us * 1e6
                        predicted.setdefault((policy, other), []).append(rate)
    middle = {policy: median(values) for policy, values in rates.items()}
    print(f"\n{'policy':<11}{'tok/s':>9}  spread")
    for policy in POLICIES:
        print(
            f"{policy:<11}{middle[policy]:>9.0f}  {min(rates[policy]):.0f}-{max(rates[policy]):.0f}"
        )
    print(f"forecast / watermark {middle['forecast'] / middle['watermark']:.2f}")
    print(f"forecast / greedy {middle['forecast'] / middle['greedy']:.3f}")
    print(
        f"\n{'trace of':<11}{'what-if':<11}{'predicted':>10}{'measured':>10}{'error':>8}  verdict"
    )
    for trace_of, other in itertools.permutations(POLICIES, 2):
        said, measured = predicted.get((trace_of, other), []), middle[other]
        start = f"{trace_of:<11}{other:<11}"
        if not said:
            print(f"{start}{'-':>10}{measured:>10.0f}{'-':>8}  refused: the fit is too far off")
            continue
        rate = median(said)
        text = verdict(rate, rates[trace_of], rates[other])
        refused = arguments.repeats - len(said)
        note = f", {refused} of {arguments.repeats} refused" if refused else ""
        error = 100 * (rate / measured - 1)
        print(f"{start}{rate:>10.0f}{measured:>10.0f}{error:>7.1f}%  {text}{note}")


if __name__ == "__main__":
    main()
