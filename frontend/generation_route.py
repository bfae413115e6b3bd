"""The life of one request for an answer, for chat and completions alike.

Read the body, plan the answer, generate while the client is there, tell errors. What a plan is made
of differs by route and comes as a function. Called by Starlette as a bare ASGI application.
"""

import time
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from cearx.frontend.answer_format import AnswerFormat
from cearx.frontend.choice import Choice
from cearx.frontend.detokenizer import IncrementalDetokenizer
from cearx.frontend.disconnect import serve_while_connected
from cearx.frontend.engine_client import EngineRequest
from cearx.frontend.errors import ApiError, model_not_found
from cearx.frontend.http_io import ClientDisconnected, read_body, refuse_body, send_error
from cearx.frontend.prompts import Prompt
from cearx.frontend.respond import AnswerPlan, respond
from cearx.frontend.sampling import Generation
from cearx.frontend.server_state import ServerState

MakePlan = Callable[[ServerState, bytes], Awaitable[AnswerPlan]]


class GenerationRoute:
    """An ASGI application; `make_plan` raises ApiError for a request that cannot be served."""

    def __init__(self, state: ServerState, make_plan: MakePlan) -> None:
        self._state = state
        self._make_plan = make_plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, self._state.config.max_body_bytes)
        except ClientDisconnected:
            return
        except ApiError as error:
            await refuse_body(receive, send, error)
            return

        received_us = time.monotonic_ns() // 1000

        async def answer(send: Send) -> None:
            try:
                plan = await self._make_plan(self._state, body)
                plan.received_us = received_us
                await respond(self._state.client, plan, send)
            except ApiError as error:
                await send_error(send, error)

        await serve_while_connected(receive, send, answer)


def check_model(state: ServerState, name: str | None) -> None:
    """An absent name means the model that is served; raises ApiError (404) for another."""
    if name is not None and name != state.model_name:
        raise model_not_found(name, state.model_name)


def build_plan(
    state: ServerState, generation: Generation, prompts: list[Prompt], answer_format: AnswerFormat
) -> AnswerPlan:
    """num_choices engine requests for each prompt, in order; raises ApiError (503)."""
    context_length = state.context_length(state.client.require_ready())
    requests: list[EngineRequest] = []
    choices: list[Choice] = []
    for prompt in prompts:
        max_tokens = generation.max_tokens_for(prompt, context_length)
        for number in range(generation.num_choices):
            sampling = generation.sampling_for(number, max_tokens)
            requests.append(
                EngineRequest(
                    token_ids=prompt.token_ids,
                    block_hashes=prompt.block_hashes,
                    cache_root=prompt.cache_root,
                    max_tokens=max_tokens,
                    sampling=sampling,
                    priority=generation.priority,
                    has_exact_length=generation.has_exact_length,
                    num_choices=0 if number else generation.num_choices,
                )
            )
            detokenizer = IncrementalDetokenizer(
                state.tokenizer,
                skip_special_tokens=generation.skip_special_tokens,
                prompt_tail=prompt.tail,
            )
            choices.append(
                Choice(
                    len(choices),
                    detokenizer,
                    stops=generation.stops,
                    include_stop=generation.include_stop,
                    min_tokens=sampling.min_tokens,
                )
            )
    return AnswerPlan(
        requests=requests,
        choices=choices,
        choices_per_prompt=generation.num_choices,
        num_prompt_tokens=sum(prompt.num_tokens for prompt in prompts),
        format=answer_format,
        stream=generation.stream,
        stream_interval=state.config.stream_interval,
        include_usage=generation.include_usage,
        continuous_usage=generation.continuous_usage,
        shows_cached_tokens=state.config.enable_prompt_tokens_details,
    )
