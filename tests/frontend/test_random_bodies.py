"""Any body gets an answer or an error object: never a 5xx, never a broken stream."""

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fake_core import Reply, logprob_of
from frontend_server import FrontendServer, frontend_server
from random_bodies import POOLING, Route, random_body

from cearx.core.config import Task
from cearx.core.messages import Submit


def say(submit: Submit) -> Reply:
    """Bytes that depend on the seed, with log-probabilities where they are asked for."""
    token_ids = [(submit.sampling.seed >> i) % 256 for i in range(min(submit.max_tokens, 8))]
    wants_logprobs = submit.sampling.num_logprobs is not None
    logprobs = [logprob_of(i, t) for i, t in enumerate(token_ids)] if wants_logprobs else None
    return Reply(token_ids=token_ids, logprobs=logprobs, splits=[1, 3])


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendServer]:
    with frontend_server() as started:
        started.core.reply = say
        yield started


def check_answer(status: int, body: bytes) -> None:
    """200 with JSON or whole events, or 400 with an error object."""
    if status == 200 and body.startswith(b"data: "):
        lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
        assert lines[-1] == b"[DONE]"
        for line in lines[:-1]:
            assert "error" not in msgspec.json.decode(line), line
        return
    answer: Any = msgspec.json.decode(body)
    if status != 200:
        assert status == 400, (status, body)
        assert list(answer["error"]) == ["message", "type", "param", "code"]
        assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("seed", range(4))
def test_random_bodies(server: FrontendServer, seed: int) -> None:
    """250 bodies a seed; at least some are answered and some refused."""
    send_bodies(server, random.Random(seed), 250)


@pytest.mark.parametrize("task", ["embed", "score"])
def test_random_bodies_for_vectors(task: Task) -> None:
    """The same for embeddings, scores and rankings, by both kinds of models."""
    routes = POOLING if task == "embed" else POOLING[1:]
    with frontend_server(task=task) as server:
        send_bodies(server, random.Random(1), 400, routes)
        assert server.core.num_running == 0


def send_bodies(
    server: FrontendServer, chance: random.Random, count: int, *routes: list[Route]
) -> None:
    """Checks each answer, and that there were enough of both kinds."""
    statuses: dict[int, int] = {}
    for _ in range(count):
        path, body = random_body(chance, *routes)
        answer = server.post(path, **body)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        try:
            check_answer(answer.status_code, answer.content)
        except AssertionError as error:
            raise AssertionError(f"{path} {body}: {answer.text[:500]}") from error
    assert statuses.keys() == {200, 400} and min(statuses.values()) > 20
