"""What a model's publisher recommends for sampling, where the request says nothing.

Owns the reading of generation_config.json (or of the same facts in GGUF metadata). Never applies
them: the routes do, under what the client gave. Absent values are OpenAI's defaults.
"""

import math
from pathlib import Path

import msgspec

from cearx.core.child import StartupError
from cearx.core.config import DEFAULT_MODEL, ModelFiles
from cearx.core.gguf_file import GGUFFile
from cearx.frontend.openai_types import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY


class GenerationConfigError(StartupError):
    """The recommendation makes no sense; the message names file, field and value."""


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults of a model; the meanings are those of `messages.SamplingParams`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    """Ids that the publisher lists as ends of a generation."""


class _GenerationConfig(msgspec.Struct):
    """The fields of generation_config.json that matter here; null is the same as absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None


GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


DEFAULT_MODEL_SAMPLING = GenerationDefaults(temperature=0.2, top_p=0.9)
"""From the model card of SmolLM2-135M-Instruct; its GGUF file does not repeat them, and at
temperature 1 so small a model answers at random."""


def load_generation_defaults(files: ModelFiles) -> GenerationDefaults:
    """Raises GenerationConfigError for values out of range, GGUFError for an unreadable file."""
    if files.path.is_dir():
        return read_generation_config(files.path)
    if files.name == DEFAULT_MODEL:
        return DEFAULT_MODEL_SAMPLING
    return from_gguf(GGUFFile(files.path))


def read_generation_config(folder: Path) -> GenerationDefaults:
    """From generation_config.json; where there is none, the end ids come from config.json."""
    path = folder / "generation_config.json"
    if not path.is_file():
        path = folder / "config.json"
        if not path.is_file():
            return GenerationDefaults()
        ends = _decode(path).eos_token_id
        return _checked(_GenerationConfig(eos_token_id=ends), path)
    return _checked(_decode(path), path)


def from_gguf(file: GGUFFile) -> GenerationDefaults:
    """From the `general.sampling.*` keys; the end ids are the tokenizer's business there."""
    found = {name: file.get(key) for name, key in GGUF_KEYS.items()}
    try:
        config = msgspec.convert(found, _GenerationConfig)
    except msgspec.ValidationError as error:
        raise GenerationConfigError(f"{file.path}: general.sampling: {error}") from error
    return _checked(config, file.path)


def _decode(path: Path) -> _GenerationConfig:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_GenerationConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise GenerationConfigError(f"{path} cannot be used: {error}") from error


def _checked(config: _GenerationConfig, path: Path) -> GenerationDefaults:
    ends = config.eos_token_id
    fields = msgspec.structs.asdict(config)
    del fields["eos_token_id"]
    if config.top_k is not None and config.top_k < 0:
        fields["top_k"] = 0  # a usual way to write "no limit"
    given = {name: value for name, value in fields.items() if value is not None}
    defaults = GenerationDefaults(
        **given, eos_token_ids=tuple([ends] if isinstance(ends, int) else ends or ())
    )
    ranges = {
        "temperature": (0 <= defaults.temperature < math.inf, "at least 0 and finite"),
        "top_p": (0 < defaults.top_p <= 1, "in (0, 1]"),
        "min_p": (0 <= defaults.min_p <= 1, "in [0, 1]"),
        "repetition_penalty": (
            MIN_REPETITION_PENALTY <= defaults.repetition_penalty <= MAX_REPETITION_PENALTY,
            f"in [{MIN_REPETITION_PENALTY}, {MAX_REPETITION_PENALTY}]",
        ),
        "eos_token_id": (all(end >= 0 for end in defaults.eos_token_ids), "at least 0"),
    }
    for name, (fits, limit) in ranges.items():
        if not fits:
            value = getattr(config, name)
            raise GenerationConfigError(f"{path}: {name} must be {limit}, got {value}")
    return defaults
