"""What a request says about generation, completed by the model's defaults and checked as a whole.

Owns every rule that joins fields, or a field with the model or the server's configuration. What it
returns is valid for the engine as it is. Called by both routes.
"""

import secrets
from typing import Any

import msgspec

from cearx.core.messages import EngineReady, SamplingParams
from cearx.frontend.errors import invalid, not_supported, shown
from cearx.frontend.openai_types import (
    INT64_MAX,
    MAX_LOGIT_BIAS_VALUE,
    CompletionRequest,
    GenerationRequest,
)
from cearx.frontend.prompts import Prompt
from cearx.frontend.server_state import ServerState
from cearx.frontend.token_limits import allowed_token_ids, bad_word_tokens, check_token_ids


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a request's generation except its prompts."""

    num_choices: int
    """For each prompt."""
    sampling: SamplingParams
    seed: int
    max_tokens: int | None
    """None: as many as the context holds."""
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    echo: bool
    num_echo_logprobs: int | None
    """Most likely tokens told of for each token of an echo; None: no log-probabilities."""
    num_prompt_logprobs: int | None
    """The same for the prompt's own field of the answer."""
    shows_token_ids: bool
    grammar: str | None
    """What the output must follow."""
    priority: int
    has_exact_length: bool
    """Whether nothing but max_tokens ends it."""
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def is_prompt_only(self) -> bool:
        """Whether the token that the engine always samples is not told."""
        return self.max_tokens == 0

    def max_tokens_for(self, prompt: Prompt, context_length: int) -> int:
        """Clamped to the context, and at least 1."""
        room = context_length - prompt.num_tokens
        assert room >= 1, f"a prompt of {prompt.num_tokens} tokens for {context_length}"
        return room if self.max_tokens is None else max(1, min(self.max_tokens, room))

    def sampling_for(self, choice: int, max_tokens: int) -> SamplingParams:
        """With the choice's own seed, so that the choices of one prompt differ.

        The first choice tells of the prompt; echoes tell of it each.
        """
        wanted = [self.num_echo_logprobs, self.num_prompt_logprobs if choice == 0 else None]
        return msgspec.structs.replace(
            self.sampling,
            seed=(self.seed + choice) & INT64_MAX,
            min_tokens=min(self.sampling.min_tokens, max_tokens),
            num_prompt_logprobs=max((k for k in wanted if k is not None), default=None),
        )


def build_generation(
    request: GenerationRequest,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    state: ServerState,
    grammar: str | None = None,
) -> Generation:
    """Raises ApiError. The routes have different names for max_tokens and num_logprobs.

    `grammar`: what the output must follow, checked already.
    """
    engine, defaults = state.client.require_ready(), state.defaults
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        message = f"min_tokens must be at most max_tokens, got {min_tokens} and {max_tokens}"
        raise invalid("min_tokens", message)
    ends = () if request.ignore_eos else state.eos_token_ids
    stop_token_ids = check_token_ids("stop_token_ids", request.stop_token_ids, engine.vocab_size)
    sampling = SamplingParams(
        temperature=_given(request.temperature, defaults.temperature),
        top_p=_given(request.top_p, defaults.top_p),
        top_k=max(0, _given(request.top_k, defaults.top_k)),
        min_p=_given(request.min_p, defaults.min_p),
        min_tokens=min_tokens,
        eos_token_ids=ends,
        stop_token_ids=stop_token_ids,
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias or {}, engine.vocab_size),
        num_logprobs=num_logprobs,
        allowed_token_ids=allowed_token_ids(request, engine.vocab_size, (*ends, *stop_token_ids)),
        bad_words=bad_word_tokens(request.bad_words or [], state.tokenizer, engine.vocab_size),
    )
    echo = bool(request.echo)
    include_usage, continuous_usage = _stream_options(request)
    stop = request.stop or []
    return Generation(
        num_choices=request.n or 1,
        sampling=sampling,
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        max_tokens=max_tokens,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        echo=echo,
        num_echo_logprobs=num_logprobs if echo and isinstance(request, CompletionRequest) else None,
        num_prompt_logprobs=_num_prompt_logprobs(request, state.config.max_logprobs),
        shows_token_ids=bool(request.return_token_ids),
        grammar=grammar,
        priority=checked_priority(request.priority, engine),
        has_exact_length=not (stop or sampling.eos_token_ids or sampling.stop_token_ids),
        stream=bool(request.stream),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
    )


def checked_priority(priority: int | None, engine: EngineReady) -> int:
    """Raises ApiError (400) for one that would not count."""
    if priority and not engine.has_priorities:
        message = (
            "priority is not supported unless the server runs with --scheduling-policy priority: "
            f"it must be 0, got {priority}"
        )
        raise not_supported("priority", message)
    return priority or 0


def check_num_logprobs(param: str, value: int, limit: int) -> int:
    """Raises ApiError when more are asked for than --max-logprobs."""
    if value > limit:
        raise invalid(param, f"{param} must be at most {limit} (--max-logprobs), got {value}")
    return value


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _stream_options(request: GenerationRequest) -> tuple[bool, bool]:
    options = request.stream_options
    if options is None:
        return False, False
    if not request.stream:
        message = f"stream_options needs stream to be true, got {shown(request.stream)}"
        raise invalid("stream_options", message)
    if options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise not_supported(name, f"{name} is not supported: it must be false, got true")
    include_usage = bool(options.include_usage)
    return include_usage, include_usage and bool(options.continuous_usage_stats)


def _num_prompt_logprobs(request: GenerationRequest, limit: int) -> int | None:
    wanted = request.prompt_logprobs
    if wanted is None:
        return None
    if request.stream:
        message = "prompt_logprobs are not told in a stream: stream must be false, got true"
        raise invalid("prompt_logprobs", message)
    return check_num_logprobs("prompt_logprobs", wanted, limit)


def _logit_bias(bias: dict[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for name, value in bias.items():
        token_id = int(name) if name.isascii() and name.isdigit() and len(name) < 12 else -1
        if not 0 <= token_id < vocab_size:
            raise invalid(
                "logit_bias",
                f"Key {shown(name)} of logit_bias is not a token id in the vocabulary of "
                f"{vocab_size} tokens",
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        limit = MAX_LOGIT_BIAS_VALUE
        if not is_number or not -limit <= value <= limit:
            raise invalid(
                "logit_bias",
                f"Value {shown(value)} of logit_bias for token {token_id} must be a number from "
                f"{-limit} to {limit}",
            )
        pairs[token_id] = float(value)
    return tuple(pairs.items())
