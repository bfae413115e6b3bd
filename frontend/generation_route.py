"""The life of one request for an answer, for chat and completions alike.

Plan the answer, then generate it. What a plan is made of differs by route and comes as a function.
Called by Starlette as a bare ASGI application.
"""

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from anyio import to_thread
from starlette.types import Receive, Scope, Send

from cearx.core.block_hash import DIGEST_SIZE
from cearx.core.identifiers import BlockHash
from cearx.core.messages import SamplingParams
from cearx.frontend.answer_format import AnswerFormat
from cearx.frontend.choice import Choice
from cearx.frontend.detokenizer import IncrementalDetokenizer
from cearx.frontend.errors import ApiError, invalid, model_not_found
from cearx.frontend.logprobs import TokenNames
from cearx.frontend.openai_types import MAX_CHOICES, GenerationRequest
from cearx.frontend.output_parser import OutputRules
from cearx.frontend.prompt_part import Echo, PromptPart, echo_of
from cearx.frontend.prompts import Prompt
from cearx.frontend.request_life import Received, serve_request
from cearx.frontend.request_window import EngineRequest
from cearx.frontend.respond import AnswerPlan, respond
from cearx.frontend.sampling import Generation
from cearx.frontend.server_state import ServerState
from cearx.frontend.structured_output import (
    Constraint,
    check_conflicts,
    constraint_of,
    is_constrained,
    json_constraint,
)

MAX_PROMPT_LOGPROBS = 1 << 20
"""Log-probabilities of prompts in one answer; each is some 50 bytes of its body."""

PLAIN_TEXT = OutputRules()

MakePlan = Callable[[ServerState, bytes], Awaitable[AnswerPlan]]


class GenerationRoute:
    """An ASGI application; `make_plan` raises ApiError for a request that cannot be served."""

    def __init__(
        self,
        state: ServerState,
        make_plan: MakePlan,
        error_body: Callable[[ApiError], bytes] = ApiError.body,
    ) -> None:
        self._state = state
        self._make_plan = make_plan
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await serve_request(self._state, scope, receive, send, self._answer, self._error_body)

    async def _answer(self, state: ServerState, received: Received, send: Send) -> None:
        plan = await self._make_plan(state, received.body)
        plan.received_us = received.received_us
        plan.label = received.label
        await respond(state.client, plan, send)


def check_model(state: ServerState, name: str | None) -> None:
    """None means the model that is served; raises ApiError (404) for another."""
    if name is not None and name != state.model_name:
        raise model_not_found(name, state.model_name)


async def checked_grammar(
    state: ServerState, request: GenerationRequest, tool_schema: dict[str, Any] | None = None
) -> str | None:
    """What the output of a request must follow, if anything; raises ApiError.

    `tool_schema`: of the call that the answer has to be.
    """
    threads = state.prompt_work.threads
    constraint: Constraint | None = None
    if is_constrained(request):
        constraint = await to_thread.run_sync(constraint_of, request, limiter=threads)
    if tool_schema is not None:
        if constraint is not None:
            message = f"tool_choice forces a call, which cannot follow {constraint.param} too"
            raise invalid("tool_choice", message)
        constraint = await to_thread.run_sync(
            json_constraint, "tools", tool_schema, limiter=threads
        )
    if constraint is None:
        return None
    check_conflicts(constraint, request)
    await state.grammars.check(constraint)
    return constraint.grammar


def answer_format(
    state: ServerState, request: GenerationRequest, format_type: type[AnswerFormat]
) -> AnswerFormat:
    """How the answer to a request is written."""
    names = TokenNames(
        token_bytes=state.tokenizer.token_bytes,
        as_token_ids=bool(request.return_tokens_as_token_ids),
    )
    options = request.stream_options
    return format_type(
        state.model_name,
        int(time.time()),
        names,
        announces_usage=options is not None and bool(options.include_usage),
        shows_token_ids=bool(request.return_token_ids),
        label=request.request_id,
    )


def build_plan(
    state: ServerState,
    generation: Generation,
    prompts: list[Prompt],
    answer_format: AnswerFormat,
    *,
    chat_echo: str | None = None,
    output_rules: OutputRules = PLAIN_TEXT,
) -> AnswerPlan:
    """num_choices engine requests for each prompt, in order; raises ApiError.

    `chat_echo`: what a chat's echo begins with, instead of the prompt.
    """
    _check_sizes(generation, prompts)
    context_length = state.context_length(state.client.require_ready())
    requests: list[EngineRequest] = []
    choices: list[Choice] = []
    for prompt in prompts:
        max_tokens = generation.max_tokens_for(prompt, context_length)
        echo = _echo(state, generation, prompt, chat_echo)
        for number in range(generation.num_choices):
            sampling = generation.sampling_for(number, max_tokens)
            requests.append(
                EngineRequest(
                    token_ids=prompt.token_ids,
                    block_hashes=block_hashes(prompt, sampling),
                    cache_root=prompt.cache_root,
                    max_tokens=max_tokens,
                    sampling=sampling,
                    priority=generation.priority,
                    has_exact_length=generation.has_exact_length,
                    num_choices=0 if number else generation.num_choices,
                    grammar=generation.grammar,
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
                    prompt=_prompt_part(generation, prompt, echo, number),
                    shows_token_ids=generation.shows_token_ids,
                    is_prompt_only=generation.is_prompt_only,
                    parser=output_rules.make_parser(prompt.text or ""),
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
        keep_alive_s=state.config.sse_keep_alive_interval,
        include_usage=generation.include_usage,
        continuous_usage=generation.continuous_usage,
        shows_cached_tokens=state.config.enable_prompt_tokens_details,
        shows_reasoning_tokens=output_rules.splits_reasoning,
    )


def block_hashes(prompt: Prompt, sampling: SamplingParams) -> tuple[BlockHash, ...]:
    """The prompt's own; random ones where all of it must be computed, so that no block is found.

    Log-probabilities of a prompt come from computing it, and the cache keeps none of them.
    """
    if sampling.num_prompt_logprobs is None:
        return prompt.block_hashes
    return tuple(BlockHash(secrets.token_bytes(DIGEST_SIZE)) for _ in prompt.block_hashes)


def _check_sizes(generation: Generation, prompts: list[Prompt]) -> None:
    num_choices = generation.num_choices * len(prompts)
    if num_choices > MAX_CHOICES:
        message = (
            f"n times the number of prompts must be at most {MAX_CHOICES}, "
            f"got {generation.num_choices} times {len(prompts)}"
        )
        raise invalid("n", message)
    told = [
        generation.sampling_for(i, 1).num_prompt_logprobs for i in range(generation.num_choices)
    ]
    per_token = sum(1 + k for k in told if k is not None)
    size = per_token * sum(prompt.num_tokens for prompt in prompts)
    if size > MAX_PROMPT_LOGPROBS:
        message = (
            f"An answer may have {MAX_PROMPT_LOGPROBS} log-probabilities of prompts, "
            f"this one would have {size}"
        )
        raise invalid("prompt" if generation.echo else "prompt_logprobs", message)


def _echo(
    state: ServerState, generation: Generation, prompt: Prompt, chat_echo: str | None
) -> Echo | None:
    if not generation.echo:
        return None
    if chat_echo is not None:
        return Echo(text=chat_echo, offsets=())
    return echo_of(prompt, state.tokenizer, skip_special_tokens=generation.skip_special_tokens)


def _prompt_part(
    generation: Generation, prompt: Prompt, echo: Echo | None, number: int
) -> PromptPart | None:
    num_prompt_logprobs = generation.num_prompt_logprobs if number == 0 else None
    if echo is None and num_prompt_logprobs is None and not generation.shows_token_ids:
        return None
    return PromptPart(
        prompt.ids(),
        echo=echo,
        num_echo_logprobs=generation.num_echo_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        shows_token_ids=generation.shows_token_ids,
    )
