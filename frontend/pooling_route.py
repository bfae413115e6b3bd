"""The life of one request for vectors: embeddings, scores and rankings alike.

Owns the work for the engine and its collection; prompts and the form of the answer come from the
route's own function. Called by Starlette as a bare ASGI application.
"""

import secrets
import sys
from array import array
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from anyio import to_thread
from starlette.types import Receive, Scope, Send

from cearx.core.messages import Pooling, SamplingParams
from cearx.frontend.choice import raise_failure
from cearx.frontend.engine_client import EngineClient
from cearx.frontend.http_io import send_body
from cearx.frontend.openai_types import PromptTokensDetails
from cearx.frontend.pooling_types import PoolingRequest, PoolingUsage
from cearx.frontend.prompts import Prompt
from cearx.frontend.request_life import Received, serve_request
from cearx.frontend.request_window import EngineRequest
from cearx.frontend.sampling import checked_priority
from cearx.frontend.server_state import ServerState

LARGE_BYTES = 64 * 1024
"""Vectors of more than so many bytes are written as text in a thread."""

Vectors = Sequence[bytes]
"""Little-endian float32, one for each prompt."""


class PoolingPlan(msgspec.Struct, kw_only=True):
    """All that it takes to answer one HTTP request."""

    requests: list[EngineRequest]
    num_prompt_tokens: int
    make_answer: Callable[[Vectors, PoolingUsage], msgspec.Struct]


MakePoolingPlan = Callable[[ServerState, bytes], Awaitable[PoolingPlan]]


class PoolingRoute:
    """An ASGI application; `make_plan` raises ApiError for a request that cannot be served."""

    def __init__(self, state: ServerState, make_plan: MakePoolingPlan) -> None:
        self._state = state
        self._make_plan = make_plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await serve_request(self._state, scope, receive, send, self._answer)

    async def _answer(self, state: ServerState, received: Received, send: Send) -> None:
        plan = await self._make_plan(state, received.body)
        vectors, num_cached = await _collect(state.client, plan, received)
        details = None
        if state.config.enable_prompt_tokens_details:
            details = PromptTokensDetails(cached_tokens=num_cached)
        usage = PoolingUsage(
            prompt_tokens=plan.num_prompt_tokens,
            total_tokens=plan.num_prompt_tokens,
            prompt_tokens_details=details,
        )

        def write() -> bytes:
            return msgspec.json.encode(plan.make_answer(vectors, usage))

        if sum(map(len, vectors)) > LARGE_BYTES:
            body = await to_thread.run_sync(write, limiter=state.prompt_work.threads)
        else:
            body = write()
        await send_body(send, 200, body)


async def _collect(
    client: EngineClient, plan: PoolingPlan, received: Received
) -> tuple[list[bytes], int]:
    """The vector of each request, and the tokens that the prefix cache had; raises ApiError."""
    found: dict[int, bytes] = {}
    num_cached = 0
    submitted = client.submit(plan.requests, received.received_us)
    with submitted as stream, client.labels.holding(received.label, stream):
        async for batch in stream:
            for index, output in batch:
                raise_failure(output)
                assert output.vector is not None, "an output of a pooled prompt without a vector"
                found[index] = output.vector
                num_cached += output.num_cached_tokens or 0
    return [found[index] for index in range(len(plan.requests))], num_cached


def engine_requests(
    state: ServerState, request: PoolingRequest, prompts: Sequence[Prompt], pooling: Pooling
) -> list[EngineRequest]:
    """One for each prompt; raises ApiError."""
    priority = checked_priority(request.priority, state.client.require_ready())
    return [
        EngineRequest(
            token_ids=prompt.token_ids,
            block_hashes=prompt.block_hashes,
            cache_root=prompt.cache_root,
            max_tokens=1,
            sampling=SamplingParams(),
            priority=priority,
            has_exact_length=True,
            pooling=pooling,
        )
        for prompt in prompts
    ]


def unpack_floats(vector: bytes) -> list[float]:
    """The numbers of a vector."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def answer_id(prefix: str, label: str | None) -> str:
    return f"{prefix}-{label or secrets.token_hex(16)}"
