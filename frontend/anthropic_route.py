"""POST /v1/messages: Anthropic's API for the same conversations as the chat route's."""

from cearx.frontend.anthropic_format import AnthropicFormat
from cearx.frontend.anthropic_types import MessagesRequest, chat_fields
from cearx.frontend.chat_route import plan_conversation
from cearx.frontend.openai_types import ChatCompletionRequest
from cearx.frontend.request_fields import convert
from cearx.frontend.respond import AnswerPlan
from cearx.frontend.server_state import ServerState


async def plan_messages(state: ServerState, body: bytes) -> AnswerPlan:
    """Raises ApiError."""
    asked = state.parser.parse(body, MessagesRequest)
    request = convert(chat_fields(asked), ChatCompletionRequest)
    plan = await plan_conversation(state, request, AnthropicFormat, num_bytes=len(body))
    assert isinstance(plan.format, AnthropicFormat), "the route's own format"
    plan.format.num_prompt_tokens = plan.num_prompt_tokens
    plan.include_usage = True  # the last event of a stream tells it in any case
    return plan
