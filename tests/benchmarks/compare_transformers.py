"""Decode speed of the worker's model step beside transformers' generate, in one run.

Owns a measurement, not a test: run it by hand on a quiet machine. Both sides compute the same
shape (SmolLM2-135M, random weights) in float32 with the same threads, in turns (A B A B), greedy.
The sockets, the scheduler and the HTTP server are not part of it.

    python tests/benchmarks/compare_transformers.py --batch 1 16 --context 256
"""

import argparse
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cearx.worker.attention import AttentionMetadata
from cearx.worker.kv_cache import KVCache
from cearx.worker.model_config import from_hf_config
from cearx.worker.models.llama import LlamaForCausalLM as PagedLlama
from cearx.worker.tensor_parallel import SingleRank
from cearx.worker.weights import DummyWeights, fill_slots

BLOCK_SIZE = 16
TURN = 8
"""Steps of one side before the other's turn."""
SMOLLM2_135M = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=49152,
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
)


class PagedDecoder:
    """The worker's model over scattered blocks, with the step's inputs built as the loop does."""

    def __init__(self, batch: int, context: int, steps: int) -> None:
        config = from_hf_config(SMOLLM2_135M.to_dict())
        self.model = PagedLlama(config, torch.float32, SingleRank())
        slots = self.model.weight_slots()
        fill_slots(slots, DummyWeights(slots, 0), lambda _: False, lambda *_: None)
        blocks_each = -(-(context + steps) // BLOCK_SIZE)
        self.kv_cache = KVCache(config, batch * blocks_each, BLOCK_SIZE, torch.float32)
        for layer_SHD in self.kv_cache.layers_SHD:
            layer_SHD.normal_()
        self.block_tables = torch.randperm(batch * blocks_each).view(batch, blocks_each)
        self.batch, self.context = batch, context

    @torch.inference_mode()
    def decode(self, steps: int) -> list[float]:
        """Decodes from the context on; seconds of each step."""
        ids = torch.zeros(self.batch, dtype=torch.int64)
        times: list[float] = []
        for position in range(self.context, self.context + steps):
            start = time.perf_counter()
            block = self.block_tables[:, position // BLOCK_SIZE]
            metadata = AttentionMetadata(
                num_decodes=self.batch,
                cu_seqlens_q=torch.arange(self.batch + 1),
                seq_lens=torch.full((self.batch,), position + 1),
                block_tables=self.block_tables,
                slot_mapping=block * BLOCK_SIZE + position % BLOCK_SIZE,
            )
            positions = torch.full((self.batch,), position)
            rows = torch.arange(self.batch)
            logits = self.model.forward(ids, positions, self.kv_cache, metadata, rows)
            ids = logits.argmax(-1)
            times.append(time.perf_counter() - start)
        return times


class Turns:
    """A streamer that times generate's steps and, every `TURN` of them, lets the other side run.

    The two sides alternate within seconds, so that a busy machine slows both alike.
    """

    def __init__(self, decoder: PagedDecoder) -> None:
        self.decoder = decoder
        self.theirs: list[float] = []
        self.ours: list[float] = []
        self._calls = 0
        self._start = 0.0

    def put(self, _: torch.Tensor) -> None:
        """Called with the prompt, then after every step; the first step is the prefill."""
        if self._calls >= 2:
            self.theirs.append(time.perf_counter() - self._start)
        self._calls += 1
        if self._calls >= 2 and self._calls % TURN == 0:
            self.ours += self.decoder.decode(TURN)
        self._start = time.perf_counter()

    def end(self) -> None:
        """Called when generate is done."""


def compare(batch: int, context: int, steps: int, rounds: int) -> None:
    reference = LlamaForCausalLM(SMOLLM2_135M).eval()
    ids = torch.randint(3, SMOLLM2_135M.vocab_size, (batch, context))
    decoder = PagedDecoder(batch, context, TURN)
    decoder.decode(2)
    turns = Turns(decoder)
    for _ in range(rounds):
        turns._calls = 0
        reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps + 1,
            min_new_tokens=steps + 1,
            do_sample=False,
            pad_token_id=0,
            streamer=turns,
        )
    sides = [("transformers", turns.theirs), ("cearx", turns.ours)]
    print(f"batch {batch}, context {context}, {len(turns.theirs)} and {len(turns.ours)} steps")
    for name, times in sides:
        quartiles = [1e3 * t for t in (min(times), *statistics.quantiles(times, n=4))]
        best, low, median, high = quartiles
        print(
            f"  {name:<13}ms/step: best {best:6.1f}  quartiles {low:6.1f} {median:6.1f} {high:6.1f}"
            f"   tok/s at the median {batch / median * 1e3:6.1f}"
        )
    ratios = [
        f"{theirs / ours:.2f}"
        for theirs, ours in [
            (min(turns.theirs), min(turns.ours)),
            (statistics.median(turns.theirs), statistics.median(turns.ours)),
        ]
    ]
    print(f"  times faster: best/best {ratios[0]}, median/median {ratios[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for batch in args.batch:
        compare(batch, args.context, args.steps, args.rounds)


if __name__ == "__main__":
    main()
