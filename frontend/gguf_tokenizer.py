"""Builds a byte-level BPE tokenizer from GGUF metadata.

Owns the table of pre-tokenizers (how a text is cut before BPE), which is the part that GGUF files
only name. A name that is not in the table is refused: a wrong cut gives wrong ids without any sign.
Called by `tokenizer.py`; knows nothing of requests.
"""

from collections.abc import Callable

import msgspec
import numpy as np
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

from cearx.core.gguf_file import GGUFFile
from cearx.frontend.token_bytes import TokenizerError

CONTROL, USER_DEFINED = 3, 4
"""Values of tokenizer.ggml.token_type: special tokens, and whole words added by the publisher."""

END_TOKENS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>")
)
"""Control tokens that end a turn or a text whichever of them the metadata names."""

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_DEFAULT_SPLITS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


class PreTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """What a value of tokenizer.ggml.pre stands for."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    normalize_nfc: bool = False
    whole_words: bool = False
    """A piece that is in the vocabulary is taken whole, whatever the merges say."""
    adds_bos: bool = False
    """Where the file does not say."""


def _splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_LLAMA3 = PreTokenizer(build=lambda: _splits(_LLAMA3_SPLIT), whole_words=True, adds_bos=True)
PRE_TOKENIZERS = {
    "smollm": PreTokenizer(build=_smollm),
    "gpt-2": PreTokenizer(build=_gpt2),
    "qwen2": PreTokenizer(build=lambda: _splits(_QWEN2_SPLIT), normalize_nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "default": PreTokenizer(build=lambda: _splits(*_DEFAULT_SPLITS)),
}


def build_backend(file: GGUFFile) -> Backend:
    """The tokenizer of a GGUF file; raises TokenizerError for what cannot be built exactly."""
    model = file.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerError(
            f"{file.path}: tokenizer {model!r} is not supported; supported: 'gpt2' (byte-level BPE)"
        )
    name = file.get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise TokenizerError(
            f"{file.path}: pre-tokenizer {name!r} is not supported; "
            f"supported: {', '.join(PRE_TOKENIZERS)}"
        )
    tokens = _tokens(file)
    backend = Backend(_bpe(file, tokens, pre))
    if pre.normalize_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = ByteLevelDecoder()
    _add_tokens(file, backend, tokens)
    _add_template(file, backend, tokens, pre)
    return backend


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise TokenizerError(f"{file.path} has no tokenizer.ggml.tokens")
    return tokens


def _bpe(file: GGUFFile, tokens: list[str], pre: PreTokenizer) -> models.BPE:
    merges = file.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{file.path} has no tokenizer.ggml.merges")
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) != len(tokens):
        raise TokenizerError(f"{file.path}: tokenizer.ggml.tokens has the same token twice")
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        return models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.whole_words)
    except Exception as error:  # the library raises plain Exception for every defect
        raise TokenizerError(f"{file.path}: tokenizer.ggml.merges: {error}") from error


def _add_tokens(file: GGUFFile, backend: Backend, tokens: list[str]) -> None:
    """Special and user-defined tokens, which are found in a text before anything else is cut."""
    kinds = _token_types(file, len(tokens))
    added = [
        AddedToken(tokens[index], special=bool(kinds[index] == CONTROL), normalized=False)
        for index in np.flatnonzero((kinds == CONTROL) | (kinds == USER_DEFINED)).tolist()
    ]
    backend.add_tokens([token for token in added if token.content])


def _token_types(file: GGUFFile, num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    kinds = file.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, np.ndarray) or len(kinds) != num_tokens:
        raise TokenizerError(f"{file.path}: tokenizer.ggml.token_type must have {num_tokens} items")
    return kinds


def _add_template(file: GGUFFile, backend: Backend, tokens: list[str], pre: PreTokenizer) -> None:
    """Adds BOS and EOS around a text where the file asks for it."""
    wanted = {
        "bos": _flag(file, "tokenizer.ggml.add_bos_token", pre.adds_bos),
        "eos": _flag(file, "tokenizer.ggml.add_eos_token", False),
    }
    around: dict[str, str] = {}
    special: list[tuple[str, int]] = []
    for name, is_wanted in wanted.items():
        token_id = optional_token_id(file, name)
        if is_wanted and token_id is not None:
            around[name] = tokens[token_id]
            special.append((tokens[token_id], token_id))
    if special:
        single = [*([around["bos"]] if "bos" in around else []), "$A"]
        single += [around["eos"]] if "eos" in around else []
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=special
        )


def _flag(file: GGUFFile, key: str, absent: bool) -> bool:
    value = file.get(key)
    return absent if value is None else value is True


def optional_token_id(file: GGUFFile, name: str) -> int | None:
    """`tokenizer.ggml.<name>_token_id`, or None; raises TokenizerError outside the vocabulary."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.get(key)
    limit = len(_tokens(file))
    if value is not None and (type(value) is not int or not 0 <= value < limit):
        raise TokenizerError(f"{file.path}: {key} must be in 0..{limit - 1}, got {value}")
    return value


def eos_token_ids(file: GGUFFile) -> list[int]:
    """All ids that end a generation: those that the file names, and control tokens known to."""
    tokens = _tokens(file)
    named = [optional_token_id(file, name) for name in ("eos", "eot", "eom")]
    kinds = _token_types(file, len(tokens))
    known = [
        index for index in np.flatnonzero(kinds == CONTROL).tolist() if tokens[index] in END_TOKENS
    ]
    return [token_id for token_id in named if token_id is not None] + known
