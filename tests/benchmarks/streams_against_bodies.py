"""Streams of a real server beside its whole bodies: joined, they must be the same.

Owns a comparison, not a test: a tiny random model with a tokenizer of bytes, whose texts are full
of broken characters, answers each request twice. Every stream interval is a server of its own.

    python tests/benchmarks/streams_against_bodies.py --prompts 500 --intervals 1 3 16 100
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from frontend_process import write_model
from server_process import serving
from tiny_models import save_tiny, tiny_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PIECES = ["a", "the ", "é", "你好", "😀", "\n", '"', "\\", "{", "1", " "]
FORMS = [
    {},
    {"structured_outputs": {"regex": "[a-zé😀]{3,9}(, [a-z]{1,4}){0,5}"}},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps so", "😀😀"]}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "type": "object", "properties": {"a": {"type": "string", "maxLength": 9},
        "b": {"enum": [1, "é"]}}, "required": ["a", "b"], "additionalProperties": False}}}},
]  # fmt: skip


def random_request(seed: int) -> tuple[str, dict[str, Any]]:
    """A route and a body: chat or completions, logprobs, n, stops, echo and structure mixed."""
    chance = random.Random(seed)
    text = "".join(chance.choices(PIECES, k=chance.randint(1, 12)))
    body: dict[str, Any] = {
        "model": "served",
        "max_tokens": chance.randint(1, 30),
        "seed": seed,
        "temperature": chance.choice([0, 1, 1.5]),
        "n": chance.choice([1, 1, 2]),
        "return_token_ids": chance.random() < 0.3,
        **chance.choice(FORMS),
    }
    if chance.random() < 0.3:
        body["stop"] = chance.sample(["a", "e", "é", "\x00", "no"], 2)
        body["include_stop_str_in_output"] = chance.random() < 0.5
    wants_logprobs = chance.random() < 0.4
    if chance.random() < 0.5:
        if wants_logprobs:
            body |= {"logprobs": True, "top_logprobs": chance.randint(0, 3)}
        return CHAT, body | {"messages": [{"role": "user", "content": text}]}
    if wants_logprobs:
        body["logprobs"] = chance.randint(0, 3)
    if chance.random() < 0.3:
        body |= {"echo": True}
    return TEXT, body | {"prompt": text}


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a stream's choices come to."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            whole = choices.setdefault(
                part["index"], {"text": "", "logprobs": [], "token_ids": [], "reasons": []}
            )
            delta = part.get("delta")
            whole["text"] += part["text"] if delta is None else delta.get("content", "")
            whole["logprobs"] += logprob_rows(part["logprobs"])
            whole["token_ids"] += part.get("token_ids", [])
            if part["finish_reason"] is not None:
                whole["reasons"].append((part["finish_reason"], part["stop_reason"]))
    return [choices[index] for index in sorted(choices)]


def of_body(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "text": c["message"]["content"] if "message" in c else c["text"],
            "logprobs": logprob_rows(c["logprobs"]),
            "token_ids": c.get("token_ids", []),
            "reasons": [(c["finish_reason"], c["stop_reason"])],
        }
        for c in body["choices"]
    ]


def logprob_rows(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [list(row) for row in zip(*(logprobs[name] for name in names), strict=True)]


def is_close(left: Any, right: Any) -> bool:
    """Equal, but for rounding: two choices share a batch or not, as they come."""
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) < 1e-3
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(is_close, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(is_close(left[k], right[k]) for k in left)
    return bool(left == right)


def compare(client: httpx.Client, seed: int) -> tuple[bool, int]:
    """Whether stream and body are the same, and the stream's number of events."""
    path, body = random_request(seed)
    whole = client.post(path, json=body).raise_for_status().json()
    stream = client.post(
        path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    lines = [line[6:] for line in stream.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", stream.text
    events = [json.loads(line) for line in lines[:-1]]
    is_same = is_close(joined(events), of_body(whole)) and events[-1]["usage"] == whole["usage"]
    if not is_same:
        print(f"seed {seed} differs: {body}\n{joined(events)}\n{of_body(whole)}")
    return is_same, len(events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--intervals", type=int, nargs="+", default=[1, 3, 16, 100])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(tiny_model("llama", vocab_size=258), Path(folder))
        write_model(Path(folder))
        for interval in arguments.intervals:
            flags = ["--stream-interval", str(interval), "--no-enable-prefix-caching"]
            flags += ["--served-model-name", "served"]
            with serving(folder, *flags) as server:
                with httpx.Client(base_url=server.url, timeout=60) as client:
                    found = [compare(client, seed) for seed in range(arguments.prompts)]
            num_same = sum(is_same for is_same, _ in found)
            num_events = sum(count for _, count in found)
            print(
                f"interval {interval}: {num_same} of {len(found)} streams equal their bodies, "
                f"{num_events} events"
            )


if __name__ == "__main__":
    main()
