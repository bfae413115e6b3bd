"""The model's tokenizer: text to ids and back, exactly as the model's publisher does it.

Owns the loading from a Hugging Face folder (tokenizer.json) or from GGUF metadata, and the
knowledge of which ids are special and which end a generation. Never renders templates and never
decodes token by token (`chat_template.py`, `detokenizer.py`). Called by the frontend's routes;
every method may be called from several threads at once.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as Backend

from cearx.core.config import ModelFiles
from cearx.core.gguf_file import GGUFFile
from cearx.frontend.generation_defaults import read_generation_config
from cearx.frontend.gguf_tokenizer import build_backend, eos_token_ids, optional_token_id
from cearx.frontend.length_bound import LengthBound
from cearx.frontend.token_bytes import TokenBytes, TokenizerError, token_decoder


class Tokenizer:
    """Encodes and decodes; all ids are those of the model's embedding rows."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None,
        eos_token_id: int | None,
        eos_token_ids: Iterable[int],
    ) -> None:
        """`eos_token_ids` are all ids that end a generation; `eos_token_id` is the one by name."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._plain = Backend.from_str(backend.to_str())
        self._plain.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        texts = {token_id: token.content for token_id, token in added.items()}
        decoder = token_decoder(backend)
        self._special = special
        self._all_bytes = TokenBytes(backend, decoder.to_bytes, texts, frozenset())
        self._visible_bytes = TokenBytes(backend, decoder.to_bytes, texts, special)
        self.strips_leading_space = decoder.strips_leading_space
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        ends = set(eos_token_ids) | ({eos_token_id} if eos_token_id is not None else set())
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(ends))
        vocab = backend.get_vocab(with_added_tokens=True)
        self._length_bound = LengthBound(backend, vocab, added)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        """One more than the largest id; the model's output layer may have more rows."""

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self._backend.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self._backend.id_to_token(self.eos_token_id)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The ids of `text`.

        add_special_tokens: add what the model expects around a text (for example a BOS); False for
        a rendered chat template, which writes them itself. parse_special: special tokens written
        out in the text become their ids; False takes them as ordinary characters.
        """
        backend = self._backend if parse_special else self._plain
        encoding = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = encoding.ids
        return ids

    def min_num_tokens(self, text: str) -> int:
        """A lower bound of `len(encode(text))`, cheap for texts of any size; 0 says nothing."""
        return self._length_bound.min_num_tokens(text)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD, unknown ids add nothing."""
        table = self.byte_table(skip_special_tokens=skip_special_tokens)
        text = b"".join([table[token_id] for token_id in token_ids]).decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def byte_table(self, *, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """id -> bytes, for any id; special tokens are empty when they are skipped."""
        return self._visible_bytes if skip_special_tokens else self._all_bytes

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, special ones written out."""
        return self._all_bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Loads the tokenizer of a model; raises TokenizerError or GGUFError with one clear line."""
    if files.path.is_dir():
        return _from_folder(files.path)
    return _from_gguf(GGUFFile(files.path))


def _from_gguf(file: GGUFFile) -> Tokenizer:
    return Tokenizer(
        build_backend(file),
        bos_token_id=optional_token_id(file, "bos"),
        eos_token_id=optional_token_id(file, "eos"),
        eos_token_ids=eos_token_ids(file),
    )


class _AddedToken(msgspec.Struct):
    content: str


class _TokenizerConfig(msgspec.Struct):
    """What we read of tokenizer_config.json."""

    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{folder} has no tokenizer.json")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every defect
        raise TokenizerError(f"{path} cannot be used: {error}") from error
    config = _read_tokenizer_config(folder)
    return Tokenizer(
        backend,
        bos_token_id=_id_of(backend, config.bos_token),
        eos_token_id=_id_of(backend, config.eos_token),
        eos_token_ids=read_generation_config(folder).eos_token_ids,
    )


def _read_tokenizer_config(folder: Path) -> _TokenizerConfig:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return _TokenizerConfig()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TokenizerConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise TokenizerError(f"{path} cannot be used: {error}") from error


def _id_of(backend: Backend, token: str | _AddedToken | None) -> int | None:
    text = token.content if isinstance(token, _AddedToken) else token
    return None if text is None else backend.token_to_id(text)
