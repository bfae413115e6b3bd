"""POST /v1/completions: from prompts to a plan of their continuations."""

from anyio import to_thread

from cearx.frontend.answer_format import CompletionFormat
from cearx.frontend.errors import invalid
from cearx.frontend.generation_route import (
    answer_format,
    build_plan,
    check_model,
    checked_grammar,
)
from cearx.frontend.openai_types import CompletionRequest
from cearx.frontend.prompts import Prompt, encode_completion_prompts, prompt_rules
from cearx.frontend.respond import AnswerPlan
from cearx.frontend.sampling import build_generation, check_num_logprobs
from cearx.frontend.server_state import ServerState

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route."""


async def plan_completion(state: ServerState, body: bytes) -> AnswerPlan:
    """Raises ApiError."""
    request = await state.parse(body, CompletionRequest)
    check_model(state, request.model)
    engine = state.client.require_ready()
    num_logprobs = request.logprobs
    if num_logprobs is not None:
        check_num_logprobs("logprobs", num_logprobs, state.config.max_logprobs)
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = max(DEFAULT_MAX_TOKENS, request.min_tokens or 0)
    if max_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "max_tokens must be >= 1 unless echo is true, got 0")
    generation = build_generation(
        request,
        max_tokens=max_tokens,
        num_logprobs=num_logprobs,
        state=state,
        grammar=await checked_grammar(state, request),
    )
    packer = state.prompt_packer(engine)
    rules = prompt_rules(
        request, adds_special_tokens=True, room=packer.context_length, max_tokens=max_tokens
    )

    def make_prompts() -> list[Prompt]:
        return encode_completion_prompts(request.prompt, packer, rules)

    def plan(prompts: list[Prompt]) -> AnswerPlan:
        return build_plan(
            state, generation, prompts, answer_format(state, request, CompletionFormat)
        )

    prompts = await state.prompt_work.run(len(body), make_prompts)
    if request.echo or generation.num_prompt_logprobs is not None:  # every token is looked at
        return await to_thread.run_sync(plan, prompts, limiter=state.prompt_work.threads)
    return plan(prompts)
