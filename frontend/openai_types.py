"""The bodies that clients send, as OpenAI's API and vLLM's extensions define them.

Types and plain ranges only; what needs the model, the server's configuration or another field is
checked where it is used (`sampling.py`, `prompts.py`, `chat_messages.py`). A field that is missing
here is unknown or not built (`request_fields.py`). Null means the same as absence.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_CHOICES_PER_PROMPT = 128
"""Largest n, as in OpenAI's API."""
MAX_CHOICES = 1024
"""Most choices of one answer, n for each prompt: every one is a request for the engine."""
MAX_PROMPTS = 1024
"""Most prompts in one completion request."""
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGIT_BIAS_VALUE = 100.0
MIN_REPETITION_PENALTY = 0.01
"""Not down to 0: logits are divided by it and must stay finite."""
MAX_REPETITION_PENALTY = 10.0
INT64_MAX = 2**63 - 1

UnitInterval = Annotated[float, Meta(ge=0.0, le=1.0)]
OpenAIPenalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
PositiveInt = Annotated[int, Meta(ge=1)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """One more chunk, with no choices, carries the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """With include_usage: every chunk carries the usage up to there."""
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What both routes take."""

    model: str
    """Without it the body is refused, or under --no-require-model it is the one that is served."""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES_PER_PROMPT)] | None = None
    max_tokens: PositiveInt | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """-1 and 0 keep the whole vocabulary."""
    min_p: UnitInterval | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    """Not in the output, at the beginning of it or behind a space; as the tokenizer cuts them."""
    allowed_token_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    """Nothing else is sampled."""
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: OpenAIPenalty | None = None
    frequency_penalty: OpenAIPenalty | None = None
    logit_bias: Annotated[dict[str, Any], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Lower goes first; other than 0 only under --scheduling-policy priority."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Keeps at most so many tokens of a prompt; -1: as many as leave room for max_tokens."""
    truncation_side: Literal["left", "right"] | None = None
    """Where a prompt that is too long is cut; left without it."""
    echo: bool | None = None
    """The answer begins with the prompt; in chat with the final message that it continues."""
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens in log-probabilities are written as `token_id:7`."""
    request_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """A label for the answer's id; it need not be unique."""
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: one of json, regex, choice, grammar, json_object; `structured_output.py` checks."""
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[Any] | None = None
    guided_grammar: str | None = None

    # Hints for OpenAI's own fleet; they change nothing in an answer.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; none: there are no arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: Function


class ToolReference(msgspec.Struct, kw_only=True):
    name: ToolName


class NamedTool(msgspec.Struct, kw_only=True):
    """The answer calls this tool."""

    type: Literal["function"]
    function: ToolReference


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: PositiveInt | None = None
    """Goes before max_tokens, its old name."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    """True without it, unless continue_final_message is."""
    continue_final_message: bool | None = None
    """The answer goes on where the last message ends."""
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    reasoning_effort: ReasoningEffort | None = None
    """Told to the chat template, as `reasoning_effort` and `enable_thinking`."""
    parallel_tool_calls: bool | None = None
    """False: at most one call in an answer."""
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Without it: auto when there are tools."""


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Any
    """Text, token ids, or a list of either; `prompts.py` checks it."""
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """0 with echo: the prompt alone."""
    logprobs: Annotated[int, Meta(ge=0)] | None = None


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cearx"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class PrefixCacheResetAnswer(msgspec.Struct, kw_only=True):
    """Answer of /reset_prefix_cache."""

    num_blocks_freed: int
    """Held nothing but contents that could be found."""
    num_blocks_in_use: int
    """Belong to requests in the engine until these end; they cannot be found either."""
