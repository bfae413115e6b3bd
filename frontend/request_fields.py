"""From the bytes of a body to a typed request: syntax, unbuilt features, unknown fields, types.

Every problem is an `ApiError` that names the field, the value and what was expected. A field that
asks for a feature that does not exist here is refused by name; a field that nobody knows is ignored
with one warning in the log, or refused under --strict-params. Called by the two routes.
"""

import re
from typing import Any, TypeVar

import msgspec
import structlog

from cearx.frontend.errors import ApiError, invalid, not_supported, shown
from cearx.frontend.openai_types import StreamOptions

REQUEST = TypeVar("REQUEST", bound=msgspec.Struct)

MAX_WARNED_FIELDS = 256
"""Names of unknown fields that are remembered and logged; clients choose them."""

MAX_FIELDS = 256
"""Most fields in one body; the event loop looks at each."""

UNBUILT: dict[str, tuple[object, ...]] = {
    # Field: the values, besides null, that ask for nothing.
    "activation": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "ebnf": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": ("",),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora_path": (),
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_embeds": (),
    "rank_fields": ([],),
    "reasoning_effort": (),
    "regex": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": (),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_activation": (True,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

# msgspec tells where and what only in its message, so the message is taken apart.
_AT_PATH = re.compile(r"^(?P<problem>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


class RequestParser:
    """Parses bodies; holds which unknown fields were logged already."""

    def __init__(self, strict_params: bool, default_model: str | None = None) -> None:
        """`default_model`: what a body asks for that names no model; None: it must name one."""
        self._strict = strict_params
        self._default_model = default_model
        self._warned: set[str] = set()
        self._log = structlog.get_logger()

    def parse(self, body: bytes, request_type: type[REQUEST]) -> REQUEST:
        """Raises ApiError (400)."""
        fields = _decode_object(body)
        takes_model = "model" in request_type.__struct_fields__
        if takes_model and self._default_model is not None and fields.get("model") is None:
            fields["model"] = self._default_model
        for name, value in fields.items():
            if name in request_type.__struct_fields__:
                continue
            if name in UNBUILT:
                _refuse_unbuilt(name, value)
            else:
                self.note_unknown(name)
        options = fields.get("stream_options")
        if isinstance(options, dict):
            for name in options.keys() - set(StreamOptions.__struct_fields__):
                self.note_unknown(f"stream_options.{name}")
        return convert(fields, request_type)

    def note_unknown(self, name: str) -> None:
        """One warning in the log, or ApiError (400) under --strict-params."""
        if self._strict:
            message = f"Unknown field {shown(name)}, and the server runs with --strict-params"
            raise invalid(name[:64], message, "unknown_parameter")
        if name not in self._warned and len(self._warned) < MAX_WARNED_FIELDS:
            self._warned.add(name)
            self._log.warning("unknown request field is ignored", field=shown(name))


def convert(fields: dict[str, Any], request_type: type[REQUEST]) -> REQUEST:
    """Raises ApiError (400) for a field of a wrong type or out of its range."""
    try:
        return msgspec.convert(fields, request_type)
    except msgspec.ValidationError as error:
        raise _explain(error, fields) from None


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except RecursionError:
        raise invalid(None, "The body is nested too deeply", "invalid_json") from None
    except UnicodeDecodeError:
        raise invalid(None, "The body is not valid UTF-8", "invalid_json") from None
    except msgspec.DecodeError as error:
        raise invalid(None, f"The body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid(None, f"The body must be a JSON object, got {shown(fields)}", "invalid_type")
    if len(fields) > MAX_FIELDS:
        message = f"The body may have at most {MAX_FIELDS} fields, got {len(fields)}"
        raise invalid(None, message, "too_many_fields")
    return fields


def _refuse_unbuilt(name: str, value: object) -> None:
    harmless = UNBUILT[name]
    if value is None or value in harmless:
        return
    only = " or ".join(["null", *map(shown, harmless)])
    raise not_supported(
        name, f"{name} is not supported by this server: it must be {only}, got {shown(value)}"
    )


def _explain(error: msgspec.ValidationError, fields: dict[str, Any]) -> ApiError:
    match = _AT_PATH.match(str(error))
    assert match is not None, "the pattern matches every text"
    problem, path = match["problem"], match["path"] or ""
    param = path.removeprefix(".").removesuffix("[...]")  # msgspec's sign for any key
    missing = _MISSING.match(problem)
    if missing:
        param = f"{param}.{missing['field']}".removeprefix(".")
        return invalid(param, f"{param} is required", "missing_required_parameter")
    value: Any = fields
    for key, index in _PATH_STEP.findall(path):
        value = value[int(index)] if index else value[key]
    problem = problem[0].lower() + problem[1:]
    return invalid(param, f"Invalid value {shown(value)} for {param}: {problem}")
