"""POST /v1/chat/completions: from a conversation to a plan of its answer."""

from typing import Any

import msgspec

from cearx.frontend.answer_format import AnswerFormat, ChatFormat
from cearx.frontend.chat_messages import template_messages, unknown_fields
from cearx.frontend.chat_template import ChatTemplate, ChatTemplateError, cut_behind, require
from cearx.frontend.errors import ApiError, invalid, not_supported, shown
from cearx.frontend.generation_route import (
    answer_format,
    build_plan,
    check_model,
    checked_grammar,
)
from cearx.frontend.openai_types import ChatCompletionRequest
from cearx.frontend.prompts import Prompt, prompt_rules
from cearx.frontend.respond import AnswerPlan
from cearx.frontend.sampling import build_generation, check_num_logprobs
from cearx.frontend.server_state import ServerState
from cearx.frontend.tool_choice import plan_tools

TEMPLATE_KWARGS = (
    "date_string",
    "enable_thinking",
    "preserve_thinking",
    "reasoning_effort",
    "thinking",
    "thinking_budget",
)
"""What a client may set in a template; others are refused, for a misspelt one would do nothing."""
MAX_KWARG_CHARS = 256


async def plan_chat(state: ServerState, body: bytes) -> AnswerPlan:
    """Raises ApiError."""
    request = await state.parse(body, ChatCompletionRequest)
    return await plan_conversation(state, request, ChatFormat, num_bytes=len(body))


async def plan_conversation(
    state: ServerState,
    request: ChatCompletionRequest,
    format_type: type[AnswerFormat],
    *,
    num_bytes: int,
) -> AnswerPlan:
    """For every route that is a chat in its own words; raises ApiError.

    `num_bytes`: of the body.
    """
    for name in sorted(unknown_fields(request.messages)):
        state.parser.note_unknown(name)
    check_model(state, request.model)
    engine = state.client.require_ready()
    max_tokens = request.max_completion_tokens or request.max_tokens
    tools = plan_tools(state, request)
    grammar = await checked_grammar(state, request, tools.schema)
    generation = build_generation(
        request,
        max_tokens=max_tokens,
        num_logprobs=_num_logprobs(request, state.config.max_logprobs),
        state=state,
        grammar=grammar,
    )
    kwargs = _template_kwargs(request)
    packer = state.prompt_packer(engine)
    rules = prompt_rules(
        request, adds_special_tokens=False, room=packer.context_length, max_tokens=max_tokens
    )
    continues = _continues_final_message(request)

    def make_prompt() -> tuple[Prompt, str | None]:
        messages = template_messages(request.messages)
        echo = messages[-1]["content"] if request.echo else None
        if tools.note is not None:
            messages[0]["content"] = tools.note + messages[0]["content"]
        text = _render(
            state.chat_template,
            messages,
            not continues and request.add_generation_prompt is not False,
            kwargs,
            tools.shown,
        )
        if continues:
            text = _cut(text, messages[-1]["content"])
        return packer.encode("messages", text, rules), echo

    prompt, echo = await state.prompt_work.run(num_bytes, make_prompt)
    return build_plan(
        state,
        generation,
        [prompt],
        answer_format(state, request, format_type),
        chat_echo=echo,
        output_rules=tools.rules
        if grammar is None  # else the first token belongs to the answer already
        else msgspec.structs.replace(tools.rules, splits_reasoning=False),
    )


def _continues_final_message(request: ChatCompletionRequest) -> bool:
    if request.continue_final_message and request.add_generation_prompt:
        message = (
            "continue_final_message and add_generation_prompt cannot both be true: "
            "an answer continues a message or begins a new one"
        )
        raise invalid("continue_final_message", message)
    if request.echo and not request.continue_final_message:
        message = f"echo needs continue_final_message to be true in chat, got {shown(False)}"
        raise invalid("echo", message)
    return bool(request.continue_final_message)


def _num_logprobs(request: ChatCompletionRequest, limit: int) -> int | None:
    if request.top_logprobs is None:
        return 0 if request.logprobs else None
    if not request.logprobs:
        message = f"top_logprobs needs logprobs to be true, got {shown(request.logprobs)}"
        raise invalid("top_logprobs", message)
    return check_num_logprobs("top_logprobs", request.top_logprobs, limit)


def _template_kwargs(request: ChatCompletionRequest) -> dict[str, Any]:
    """What the request says about reasoning, and what it sets by name, which goes before."""
    kwargs = request.chat_template_kwargs or {}
    for name, value in kwargs.items():
        if name not in TEMPLATE_KWARGS:
            allowed = ", ".join(TEMPLATE_KWARGS)
            message = f"chat_template_kwargs may set {allowed}; got {shown(name)}"
            raise not_supported("chat_template_kwargs", message)
        if isinstance(value, str) and len(value) > MAX_KWARG_CHARS:
            param = f"chat_template_kwargs.{name}"
            message = f"{param} must have at most {MAX_KWARG_CHARS} characters, got {len(value)}"
            raise invalid(param, message)
    effort = request.reasoning_effort
    if effort is None:
        return kwargs
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **kwargs}


def _render(
    template: ChatTemplate | None,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    kwargs: dict[str, Any],
    tools: list[dict[str, Any]] | None,
) -> str:
    try:
        return require(template).render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs
        )
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_error") from None


def _cut(text: str, final_content: str) -> str:
    try:
        return cut_behind(text, final_content)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_error") from None
