"""Log-likelihoods of the whole server beside transformers', SmolLM2-135M in float32.

Owns a comparison, not a test: it takes minutes. The requests are lm-eval's (`local-completions`).

    python tests/benchmarks/compare_loglikelihoods.py --items 200
"""

import argparse
import sys
from pathlib import Path

import httpx
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from loglikelihoods import Scored, read_answer, reference_scores, request_body, task_items
from server_process import serving

from cearx.core.model_source import resolve
from cearx.frontend.tokenizer import load_tokenizer

BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=200)
    arguments = parser.parse_args()
    with serving() as server:
        files = resolve(None, lambda *_: None)
        tokenizer = load_tokenizer(files)
        items = task_items(tokenizer.encode, arguments.items)
        found: list[Scored] = []
        with httpx.Client(base_url=server.url, timeout=300) as client:
            for start in range(0, len(items), BATCH):
                batch = items[start : start + BATCH]
                body = {"model": server.name, **request_body(batch)}
                answer = client.post("/v1/completions", json=body)
                found += read_answer(answer.raise_for_status().json(), batch)
    model = AutoModelForCausalLM.from_pretrained(
        str(files.path.parent), gguf_file=files.path.name, dtype=torch.float32
    )
    expected = reference_scores(model, items)
    errors = [abs(a.logprob - b.logprob) for a, b in zip(found, expected, strict=True)]
    same = sum(a.is_greedy == b.is_greedy for a, b in zip(found, expected, strict=True))
    print(
        f"{len(items)} items: largest difference {max(errors):.2e}, mean "
        f"{sum(errors) / len(errors):.2e}; greedy flags equal for {same}"
    )


if __name__ == "__main__":
    main()
