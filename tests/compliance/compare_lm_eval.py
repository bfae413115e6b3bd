"""lm-eval's logged log-likelihoods beside transformers', SmolLM2-135M in float32.

    python tests/compliance/compare_lm_eval.py SAMPLES.jsonl

where SAMPLES.jsonl is what `lm_eval --log_samples` wrote of the task of `make_lm_eval_task.py`.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from loglikelihoods import Item, reference_scores

from cearx.core.model_source import resolve


def main(path: str) -> None:
    files = resolve(None, lambda *_: None)
    folder, name = str(files.path.parent), files.path.name
    encode = AutoTokenizer.from_pretrained(folder, gguf_file=name).encode
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    items, found = [], []
    for line in Path(path).read_text().splitlines():
        sample = json.loads(line)
        arguments = sample["arguments"]["gen_args_0"]
        # As lm-eval cuts the pair: a token across the cut belongs to the context that is sent.
        context = encode(arguments["arg_0"])
        whole = encode(arguments["arg_0"] + arguments["arg_1"])
        items.append(Item(context, whole[len(context) :]))
        found.append(float(sample["resps"][0][0][0]))
    expected = [scored.logprob for scored in reference_scores(model, items)]
    errors = [abs(mine - theirs) for mine, theirs in zip(found, expected, strict=True)]
    print(f"{len(items)} items: largest difference {max(errors):.2e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
