"""POST /v1/messages and its count_tokens: Anthropic's API for what is a chat here."""

import msgspec

from cearx.frontend.anthropic_format import AnthropicFormat
from cearx.frontend.anthropic_types import (
    CountTokensAnswer,
    CountTokensRequest,
    MessagesRequest,
    chat_fields,
    prompt_fields,
)
from cearx.frontend.chat_route import plan_conversation
from cearx.frontend.errors import ApiError
from cearx.frontend.openai_types import ChatCompletionRequest
from cearx.frontend.request_fields import convert
from cearx.frontend.respond import AnswerPlan
from cearx.frontend.server_state import ServerState


async def plan_messages(state: ServerState, body: bytes) -> AnswerPlan:
    """Raises ApiError."""

    def read(body: bytes) -> ChatCompletionRequest:
        return convert(
            chat_fields(state.parser.parse(body, MessagesRequest)), ChatCompletionRequest
        )

    request = await state.prompt_work.read(body, read)
    try:
        plan = await plan_conversation(state, request, AnthropicFormat, num_bytes=len(body))
    except ApiError as error:
        told = error.error
        told.message = told.message.replace("response_format.json_schema", "output_config.format")
        raise
    assert isinstance(plan.format, AnthropicFormat), "the route's own format"
    plan.format.num_prompt_tokens = plan.num_prompt_tokens
    # What an answer always tells, in the last event of a stream or in the body.
    plan.include_usage = plan.shows_reasoning_tokens = True
    return plan


async def count_tokens(state: ServerState, body: bytes) -> bytes:
    """As a message would be counted, which also means that it must fit the context."""

    def read(body: bytes) -> ChatCompletionRequest:
        asked = state.parser.parse(body, CountTokensRequest)
        return convert(prompt_fields(asked), ChatCompletionRequest)

    request = await state.prompt_work.read(body, read)
    plan = await plan_conversation(state, request, AnthropicFormat, num_bytes=len(body))
    return msgspec.json.encode(CountTokensAnswer(input_tokens=plan.num_prompt_tokens))
