"""Random bodies against a whole server with a tiny model: 0 answers of 5xx, 0 restarts.

Owns a hunt, not a test: `--bodies 10000` takes minutes.

    python tests/benchmarks/random_bodies_against_server.py --bodies 10000 --seed 1
"""

import argparse
import asyncio
import collections
import json
import random
import sys
import tempfile
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from frontend_process import write_model
from random_bodies import random_body
from server_process import Server, serving
from tiny_models import save_tiny, tiny_model

STREAMS = 8


async def hunt(server: Server, count: int, seed: int) -> None:
    chance = random.Random(seed)
    bodies = [random_body(chance) for _ in range(count)]
    outcomes: collections.Counter[str] = collections.Counter()
    limit = asyncio.Semaphore(STREAMS)

    async def send(path: str, body: dict[str, object]) -> None:
        async with limit:
            body = {"model": server.name, **body}
            answer = await client.post(path, content=json.dumps(body).encode())
        outcome = str(answer.status_code)
        if answer.status_code == 200 and '"error"' in answer.text:
            outcome = "error in a stream"
        outcomes[outcome] += 1
        if outcome not in ("200", "400"):
            print(outcome, path, body, answer.text[-300:])

    children = {child.pid for child in server.family()}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        await asyncio.gather(*(send(path, body) for path, body in bodies))
        assert (await client.get("/health")).status_code == 200
    print(f"{count} bodies, seed {seed}: {dict(outcomes)}")
    lost = children - {child.pid for child in server.family()}
    print(f"processes that have ended: {len(lost)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(tiny_model("llama", vocab_size=258), Path(folder))
        write_model(Path(folder))
        with serving(folder) as server:
            asyncio.run(hunt(server, arguments.bodies, arguments.seed))


if __name__ == "__main__":
    main()
