"""Perplexity of SmolLM2-135M over Python's own manual, for each form that its weights can take.

Owns a measurement, not a test: it takes minutes. The text is the one behind `help('for')` and
stands in every CPython, so figures of one Python version can be compared. The model is the
worker's, without a server. The file's weights are 4-bit blocks: expanded to float32 they are the
checkpoint that `--quantization int8` then rounds. What `--quantization fp8` would keep of it on a
GPU is multiplied here in float32: the cost of rounded weights alone, as in decodes. Prompts of more
than 64 tokens have their activations rounded as well, which is not measured here.

    python tests/benchmarks/perplexity.py --windows 8 --window 1024
"""

import argparse
import math
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from paged_steps import PagedSequence, PagedSteps

from cearx.core.config import ModelFiles, WorkerConfig
from cearx.core.model_source import resolve
from cearx.frontend.tokenizer import load_tokenizer
from cearx.kernels.fp8_weight import Fp8Weight
from cearx.worker.gguf_loader import GGUFWeights
from cearx.worker.kv_cache import KVCache
from cearx.worker.memory_plan import weights_text
from cearx.worker.model_loader import LoadedModel, bytes_by_form, load_model, open_checkpoint
from cearx.worker.tensor_parallel import SingleRank
from cearx.worker.weights import WeightSource, fill_slots

BLOCK_SIZE = 16


class AsFloats:
    """A `WeightSource` that expands what another one would hand on as blocks."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def names(self) -> Iterable[str]:
        return self._source.names()

    def get(self, name: str) -> Tensor:
        return self._source.get(name)


class AsFp8(AsFloats):
    """The same, with the matrices of the layers rounded to e4m3."""

    def get(self, name: str) -> Tensor:
        tensor = super().get(name)
        if tensor.ndim != 2 or ".layers." not in name:
            return tensor
        rounded = Fp8Weight.empty(*tensor.shape, tensor.dtype, tensor.device)
        rounded.store(tensor)
        return rounded.exact()


def load_expanded(
    files: ModelFiles, *, int8: bool = False, source_type: type[AsFloats] = AsFloats
) -> LoadedModel:
    """The file's weights by way of float32; `int8` rounds them as the flag does."""
    checkpoint = open_checkpoint(files, WorkerConfig())
    assert checkpoint.gguf is not None, f"{files.path} is no GGUF file"
    model = checkpoint.model_type(checkpoint.config, torch.float32, SingleRank())
    slots = model.weight_slots()
    source = source_type(GGUFWeights(checkpoint.gguf))
    kept = fill_slots(slots, source, lambda _: False, lambda *_: None, int8=int8)
    by_form = bytes_by_form(slots, kept, torch.float32)
    return LoadedModel(model, checkpoint.config, torch.float32, by_form)


def mean_loss(loaded: LoadedModel, windows_WT: Tensor) -> float:
    """Nats a token; every token but the first of a window is predicted from those before it."""
    length = windows_WT.shape[1]
    kv_cache = KVCache(loaded.config, length // BLOCK_SIZE + 1, BLOCK_SIZE, loaded.dtype)
    steps = PagedSteps(loaded.model, kv_cache)
    losses = []
    for window_T in windows_WT:
        sequence = PagedSequence(window_T.tolist())
        logits_TV = steps.step([(sequence, length)])[0]
        losses.append(float(cross_entropy(logits_TV[:-1], window_T[1:])))
        steps.release(sequence)
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    files = resolve(None, lambda *_: None)
    text = "\n".join(topics[name] for name in sorted(topics))
    wanted = arguments.windows * arguments.window
    ids = load_tokenizer(files).encode(text[: 16 * wanted])
    if len(ids) < wanted:
        parser.error(f"the manual has {len(ids)} tokens, {wanted} are wanted")
    windows_WT = torch.tensor(ids[:wanted]).view(arguments.windows, arguments.window)
    print(f"Python {platform.python_version()}'s manual, {wanted} tokens in {arguments.windows}")
    for name, load in (
        ("the file as it is", lambda: load_model(files, WorkerConfig(), lambda *_: None)),
        ("expanded to float32", lambda: load_expanded(files)),
        ("expanded, then int8", lambda: load_expanded(files, int8=True)),
        ("expanded, then fp8", lambda: load_expanded(files, source_type=AsFp8)),
    ):
        loaded = load()
        loss = mean_loss(loaded, windows_WT)
        print(f"{name:20} perplexity {math.exp(loss):.4f} (loss {loss:.5f})", end="; ")
        print(weights_text(loaded.bytes_by_form), flush=True)


if __name__ == "__main__":
    main()
