"""The lower bound of a text's length in tokens: never too high, and high enough to be of use."""

import time
from pathlib import Path

import pytest
from small_tokenizers import SPECIAL, USER_DEFINED, gguf_tokenizer, sentencepiece_folder
from token_texts import texts

from cearx.core.config import ModelFiles
from cearx.core.model_source import resolve
from cearx.frontend.tokenizer import load_tokenizer


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_never_above_the_length(pre: str, tmp_path: Path) -> None:
    """For awkward texts, repeated ones and whole special tokens the bound holds."""
    path = gguf_tokenizer(tmp_path / "t.gguf", pre)
    tokenizer = load_tokenizer(ModelFiles(path=path, name="test"))
    samples = texts(1000, seed=1, extra=SPECIAL + USER_DEFINED)
    samples += [text * 50 for text in samples[:50]] + ["e\u0301" * 500, "\u1100\u1161" * 500]
    longest = max(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.token_bytes(i)))
    samples.append(tokenizer.token_bytes(longest).decode() * 100)
    for text in samples:
        bound = tokenizer.min_num_tokens(text)
        assert bound <= len(tokenizer.encode(text, add_special_tokens=False)), text
        assert bound > 0 or not text


@pytest.mark.model
def test_default_model_refuses_megabytes_at_once() -> None:
    """4 MiB are known not to fit 8192 tokens, long before they could be tokenised."""
    tokenizer = load_tokenizer(resolve(None, lambda stage, completed, total: None))
    text = "1234 words and 😀" * (4 << 18)
    start = time.process_time()
    assert tokenizer.min_num_tokens(text) > 8192
    assert time.process_time() - start < 0.5
    for sample in [*texts(1000, seed=2), "\x04" * 1000]:
        assert tokenizer.min_num_tokens(sample) <= len(tokenizer.encode(sample))


def test_nothing_is_said_of_other_tokenizers(tmp_path: Path) -> None:
    """Where a token can stand for any number of bytes, the bound is 0."""
    files = ModelFiles(path=sentencepiece_folder(tmp_path), name="test")
    assert load_tokenizer(files).min_num_tokens("a" * 10_000) == 0
