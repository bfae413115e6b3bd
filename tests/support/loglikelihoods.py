"""Log-likelihoods as lm-eval asks a completions server for them, and as transformers gives them.

Owns the items of a task made from the project's own texts, and the shape of lm-eval's requests
(`local-completions`: echoed prompts of token ids, one more token, one log-probability) and of its
reading of the answers. Used by the end-to-end test and by the comparison script.
"""

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

ROOT = Path(__file__).parents[2]


class Item(NamedTuple):
    """A context and a continuation of it, as token ids."""

    context: list[int]
    continuation: list[int]


class Scored(NamedTuple):
    logprob: float
    """Of the continuation after the context."""
    is_greedy: bool
    """Whether every token of it is the most likely one."""


def task_items(encode: Any, count: int, max_tokens: int = 120) -> list[Item]:
    """Pieces of the project's documents, cut at a word; the same for every run."""
    chance = random.Random(4)
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "core").glob("*.py"))]
    words = " ".join(path.read_text() for path in paths).split(" ")
    items = []
    while len(items) < count:
        start = chance.randrange(len(words) - 80)
        cut, end = start + chance.randint(2, 40), start + 41 + chance.randint(1, 6)
        context = encode(" ".join(words[start:cut]))
        continuation = encode(" " + " ".join(words[cut : min(end, cut + chance.randint(1, 6))]))
        if context and continuation and len(context) + len(continuation) <= max_tokens:
            items.append(Item(context, continuation))
    return items


def request_body(items: list[Item]) -> dict[str, Any]:
    """What lm-eval posts for a batch."""
    return {
        "prompt": [item.context + item.continuation for item in items],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }


def read_answer(answer: dict[str, Any], items: list[Item]) -> list[Scored]:
    """What lm-eval reads from it: the last token is the generated one and is left out."""
    found = []
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    for choice, item in zip(choices, items, strict=True):
        start = len(item.context)
        logprobs = choice["logprobs"]["token_logprobs"][start:-1]
        tops = choice["logprobs"]["top_logprobs"][start:-1]
        assert len(logprobs) == len(item.continuation)
        greedy = all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))
        found.append(Scored(sum(logprobs), greedy))
    return found


@torch.inference_mode()
def reference_scores(model: PreTrainedModel, items: list[Item]) -> list[Scored]:
    """By one forward pass of transformers for each item."""
    scores = []
    for item in items:
        ids = torch.tensor([item.context + item.continuation])
        logprobs_TV = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        rows_CV = logprobs_TV[len(item.context) - 1 : -1]
        targets = torch.tensor(item.continuation)
        chosen = rows_CV.gather(1, targets[:, None]).sum()
        scores.append(Scored(float(chosen), bool((rows_CV.argmax(-1) == targets).all())))
    return scores
