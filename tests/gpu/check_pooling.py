"""Checks embeddings and scores on a GPU against the CPU worker, beside texts, in every way to run.

Owns a check, not a test: run it by hand on a machine with a GPU, without HTTP and sockets. The
model is small, of random weights in bfloat16; the CPU computes the same in float32, so embeddings
must point the same way and scores be near within bfloat16's rounding. Exit code 1 when they do not.

    python tests/gpu/check_pooling.py
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / ".typing"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from check_worker import small_config, small_runner
from local_engine import LocalEngine

from cearx.core.messages import Embed, Pooling, Score
from cearx.worker.cuda.decoder import DeviceDecoder
from cearx.worker.models.registry import find_model
from cearx.worker.tensor_parallel import SingleRank
from cearx.worker.weights import DummyWeights, fill_slots

POOLINGS: tuple[Pooling, ...] = (
    Embed(),
    Embed(dimensions=100),
    Score(negative=11, positive=2_000),
)
MIN_COSINE, MAX_SCORE_ERROR = 0.999, 0.02
SIZES: dict[str, Any] = {"num_blocks": 200, "block_size": 64, "budget": 512, "max_num_seqs": 12}


def main() -> int:
    if not torch.cuda.is_available():
        print("check_pooling: no CUDA device")
        return 2
    device = torch.device("cuda", 0)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    config = small_config("tiny")
    decoder = DeviceDecoder(config, 1024, torch.bfloat16, device)
    model = find_model(config.architecture)(config, torch.float32, SingleRank())
    source = DummyWeights(model.weight_slots(), 0)
    for slots in (model.weight_slots(), decoder.weight_slots()):
        fill_slots(slots, source, lambda _: False, lambda *_: None)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 30_000, n).tolist() for n in (1, 2, 63, 64, 65, 300, 700)]
    beside = [rng.integers(0, 30_000, 40).tolist() for _ in range(3)]
    judge = LocalEngine(model, config, **SIZES)
    is_good = True
    for graphs in (False, True):
        engine = LocalEngine(
            None,  # type: ignore[arg-type]
            config,
            make_runner=lambda plan, graphs=graphs: small_runner(
                decoder, plan, "graph" if graphs else "eager"
            ),
            **SIZES,
        )
        for pooling in POOLINGS:
            wanted = np.array(judge.pool(prompts, pooling))
            runs = [engine.pool(prompts, pooling, beside=beside) for _ in range(2)]
            for found in map(np.array, runs):
                if isinstance(pooling, Score):
                    worst = float(np.abs(found - wanted).max())
                    is_good &= worst < MAX_SCORE_ERROR
                else:
                    worst = float((found * wanted).sum(axis=1).min())
                    is_good &= worst > MIN_COSINE
                print("graphs" if graphs else "eager", pooling, f"worst {worst:.5f}", flush=True)
    print("good" if is_good else "BAD")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
