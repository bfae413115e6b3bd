"""Tokens per second of the whole server beside transformers' generate, in one run.

Owns a measurement, not a test: run it by hand on a quiet machine. Both sides serve SmolLM2-135M in
float32 on the same cores, in turns (A B A B); the idle side only sleeps. The server's figure holds
everything: HTTP, processes, scheduler, sampling, detokenising, the trace log.

    python tests/benchmarks/server_against_transformers.py --streams 1 16 --tokens 64
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from server_process import Server, serving

from cearx.core.model_source import resolve

FIRST_TOKEN = 1000


async def server_seconds(
    server: Server, streams: int, prompt_len: int, tokens: int, salt: str
) -> float:
    """Wall time of `streams` concurrent streamed completions of exactly `tokens` tokens."""

    async def one(client: httpx.AsyncClient, index: int) -> int:
        body = {
            "model": server.name,
            "prompt": list(range(FIRST_TOKEN + index, FIRST_TOKEN + index + prompt_len)),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reply = await client.post("/v1/completions", json=body)
        reply.raise_for_status()
        return reply.text.count('"text"')

    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        await client.get("/health")
        start = time.perf_counter()
        events = await asyncio.gather(*(one(client, index) for index in range(streams)))
        seconds = time.perf_counter() - start
    assert min(events) > 0
    return seconds


def reference_seconds(model: PreTrainedModel, streams: int, prompt_len: int, tokens: int) -> float:
    """Wall time of one greedy generate call with a batch of `streams` prompts."""
    ids = torch.stack(
        [torch.arange(FIRST_TOKEN + i, FIRST_TOKEN + i + prompt_len) for i in range(streams)]
    )
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - start


def compare(
    server: Server, model: PreTrainedModel, streams: int, arguments: argparse.Namespace
) -> None:
    """Prints the medians of both sides and the median of the rounds' ratios."""
    ours, theirs = [], []
    for turn in range(-1, arguments.rounds):
        sizes = (streams, arguments.prompt_len, arguments.tokens)
        pair = (
            asyncio.run(server_seconds(server, *sizes, f"{streams}-{turn}")),
            reference_seconds(model, *sizes),
        )
        if turn >= 0:  # the first turn warms both up
            ours.append(pair[0])
            theirs.append(pair[1])
    total = streams * arguments.tokens
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    print(
        f"{streams:3d} streams: server {total / statistics.median(ours):7.1f} tok/s, "
        f"transformers {total / statistics.median(theirs):7.1f} tok/s, "
        f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    path = resolve(None, lambda *_: None).path
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, float32")
    with tempfile.TemporaryDirectory() as trace, serving(trace=Path(trace)) as server:
        for streams in arguments.streams:
            compare(server, model, streams, arguments)


if __name__ == "__main__":
    main()
