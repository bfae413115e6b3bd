"""POST /v1/completions: from prompts to a plan of their continuations."""

import time

from anyio import to_thread

from cearx.frontend.answer_format import CompletionFormat
from cearx.frontend.generation_route import build_plan, check_model
from cearx.frontend.openai_types import CompletionRequest
from cearx.frontend.prompts import Prompt, encode_completion_prompts
from cearx.frontend.respond import AnswerPlan
from cearx.frontend.sampling import build_generation, check_num_logprobs
from cearx.frontend.server_state import ServerState

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route."""


async def plan_completion(state: ServerState, body: bytes) -> AnswerPlan:
    """Raises ApiError."""
    request = state.parser.parse(body, CompletionRequest)
    check_model(state, request.model)
    engine = state.client.require_ready()
    num_logprobs = request.logprobs
    if num_logprobs is not None:
        check_num_logprobs("logprobs", num_logprobs, state.config.max_logprobs)
    generation = build_generation(
        request,
        max_tokens=request.max_tokens or max(DEFAULT_MAX_TOKENS, request.min_tokens or 0),
        num_logprobs=num_logprobs,
        engine=engine,
        defaults=state.defaults,
        eos_token_ids=state.eos_token_ids,
    )
    packer = state.prompt_packer(engine)

    def make_prompts() -> list[Prompt]:
        return encode_completion_prompts(
            request.prompt,
            packer,
            request.add_special_tokens is not False,
            request.cache_salt,
        )

    prompts = await to_thread.run_sync(make_prompts, limiter=state.prompt_threads)
    answer_format = CompletionFormat(
        state.model_name,
        int(time.time()),
        state.tokenizer.token_bytes,
        announces_usage=generation.include_usage,
    )
    return build_plan(state, generation, prompts, answer_format)
