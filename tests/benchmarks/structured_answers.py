"""Structured answers of a real server: do they validate, and what do they cost?

`--schemas N` asks for one answer to each of N random schemas, 16 at a time, and validates each that
finished. `--rounds N` measures tokens a second of 16 streams of equal lengths, free and constrained
in turns. Owns measurements, not a test.

    python tests/benchmarks/structured_answers.py --schemas 300 --rounds 5
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from random_schemas import random_schema
from server_process import serving

STREAMS = 16
TOKENS = 64
ENDLESS = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


def fields(prompt: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "smollm2", "messages": messages, "temperature": 0.7, **more}


def json_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def ask(client: httpx.AsyncClient, limit: asyncio.Semaphore, body: dict[str, Any]) -> Any:
    async with limit:
        answer = await client.post("/v1/chat/completions", json=body)
    return answer


async def validate(client: httpx.AsyncClient, count: int) -> None:
    limit = asyncio.Semaphore(STREAMS)
    schemas = [random_schema(seed) for seed in range(count)]
    bodies = [
        fields("Fill this form.", max_tokens=300, seed=i, response_format=json_format(schema))
        for i, schema in enumerate(schemas)
    ]
    answers = await asyncio.gather(*(ask(client, limit, body) for body in bodies))
    ends: dict[str, int] = {}
    num_invalid = 0
    for schema, answer in zip(schemas, answers, strict=True):
        if answer.status_code != 200:
            ends[f"status {answer.status_code}"] = ends.get(f"status {answer.status_code}", 0) + 1
            print(answer.text)
            continue
        choice = answer.json()["choices"][0]
        ends[choice["finish_reason"]] = ends.get(choice["finish_reason"], 0) + 1
        if choice["finish_reason"] == "stop":
            try:
                value = msgspec.json.decode(choice["message"]["content"])
                jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
            except (msgspec.DecodeError, jsonschema.ValidationError) as error:
                num_invalid += 1
                print(error)
    print(f"{count} schemas: {ends}, {num_invalid} of the finished answers are invalid")


async def one_round(client: httpx.AsyncClient, **more: Any) -> float:
    """Tokens a second of 16 requests that begin together."""
    limit = asyncio.Semaphore(STREAMS)
    bodies = [fields(f"Tell me of {i} people.", max_tokens=TOKENS, **more) for i in range(STREAMS)]
    start = time.monotonic()
    answers = await asyncio.gather(*(ask(client, limit, body) for body in bodies))
    seconds = time.monotonic() - start
    num_tokens = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
    assert num_tokens == STREAMS * TOKENS, num_tokens
    return num_tokens / seconds


async def measure(client: httpx.AsyncClient, rounds: int) -> None:
    ratios, free, bound = [], [], []
    constraint = {"response_format": json_format(ENDLESS)}
    for index in range(rounds + 1):
        free.append(await one_round(client, ignore_eos=True))
        bound.append(await one_round(client, **constraint))
        if index:  # the first warms up
            ratios.append(bound[-1] / free[-1])
    print(
        f"{STREAMS} streams of {TOKENS} tokens: free {statistics.median(free[1:]):.1f}, "
        f"constrained {statistics.median(bound[1:]):.1f} tok/s, "
        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0)
    arguments = parser.parse_args()
    with serving() as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            if arguments.schemas:
                await validate(client, arguments.schemas)
            if arguments.rounds:
                await measure(client, arguments.rounds)


if __name__ == "__main__":
    asyncio.run(main())
