"""POST /v1/responses: OpenAI's newer API for the same conversations as the chat route's."""

from typing import Any

import msgspec

from cearx.frontend.chat_route import plan_conversation
from cearx.frontend.errors import ApiError
from cearx.frontend.openai_types import ChatCompletionRequest
from cearx.frontend.request_fields import convert
from cearx.frontend.respond import AnswerPlan
from cearx.frontend.responses_format import ResponsesFormat
from cearx.frontend.responses_types import Response, ResponsesRequest, chat_fields
from cearx.frontend.server_state import ServerState

RENAMED = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("messages", "input"),
)
"""Names of the chat's fields in errors, and what a client of this route calls them."""


async def plan_responses(state: ServerState, body: bytes) -> AnswerPlan:
    """Raises ApiError."""

    def read(body: bytes) -> tuple[ResponsesRequest, ChatCompletionRequest]:
        asked = state.parser.parse(body, ResponsesRequest)
        return asked, convert(chat_fields(asked), ChatCompletionRequest)

    asked, request = await state.prompt_work.read(body, read)
    try:
        plan = await plan_conversation(state, request, ResponsesFormat, num_bytes=len(body))
    except ApiError as error:
        _rename(error)
        raise
    assert isinstance(plan.format, ResponsesFormat), "the route's own format"
    plan.format.begin(_response(asked, plan))
    # What an answer always tells, in the last event of a stream or in the body.
    plan.include_usage = plan.shows_cached_tokens = plan.shows_reasoning_tokens = True
    return plan


def _rename(error: ApiError) -> None:
    told = error.error
    for old, new in RENAMED:
        if told.param is not None and told.param.startswith(old):
            told.param = new + told.param[len(old) :]
            told.message = told.message.replace(old, new)
            return


def _response(asked: ResponsesRequest, plan: AnswerPlan) -> Response:
    sampling = plan.requests[0].sampling
    reasoning, choice = asked.reasoning, asked.tool_choice
    return Response(
        id=plan.format.id,
        created_at=plan.format.created,
        model=plan.format.model,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        metadata=asked.metadata or {},
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        prompt_cache_key=asked.prompt_cache_key,
        reasoning={"effort": reasoning.effort if reasoning else None, "summary": None},
        safety_identifier=asked.safety_identifier,
        temperature=sampling.temperature,
        text={"format": _text_format(asked)},
        tool_choice=_tool_choice(choice),
        tools=asked.tools or [],
        top_logprobs=asked.top_logprobs or 0,
        top_p=sampling.top_p,
        user=asked.user,
    )


def _text_format(asked: ResponsesRequest) -> dict[str, Any]:
    wanted = None if asked.text is None else asked.text.format
    if wanted is None:
        return {"type": "text"}
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    told: dict[str, Any] = msgspec.to_builtins(wanted)
    return told | {"name": wanted.name or "answer", "strict": True}


def _tool_choice(choice: Any) -> str | dict[str, Any]:
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if choice.type == "function":
        return {"type": "function", "name": choice.name}
    return {"type": choice.type, "mode": choice.mode, "tools": choice.tools}
