"""Tokenizers from Hugging Face folders, against transformers' reading of the same folder."""

import json
import random
from pathlib import Path

import pytest
from small_tokenizers import SPECIAL, byte_level_folder, sentencepiece_folder, trained
from token_texts import texts
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import AutoTokenizer

from cearx.core.config import ModelFiles
from cearx.frontend.token_bytes import TokenizerError
from cearx.frontend.tokenizer import Tokenizer, load_tokenizer


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles(path=folder, name="test"))


@pytest.mark.parametrize("make", [byte_level_folder, sentencepiece_folder])
def test_ids_and_text_equal_transformers(make, tmp_path: Path) -> None:
    """Ids with and without special tokens, and the text of valid ids, are those of transformers."""
    folder = make(tmp_path)
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    for text in texts(1000, seed=1, extra=[theirs.eos_token]):
        for add in (True, False):
            ids = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add_special_tokens=add) == ids, text
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == expected, text
    assert ours.bos_token == theirs.bos_token and ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token == theirs.eos_token and ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)
    added = theirs.added_tokens_decoder.items()
    special = {token_id for token_id, token in added if token.special}
    assert {i for i in range(len(theirs)) if ours.is_special(i)} == special


def test_byte_level_text_of_any_ids(tmp_path: Path) -> None:
    """Random ids, whose bytes are mostly no UTF-8, give the text that transformers gives."""
    folder = byte_level_folder(tmp_path)
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    for _ in range(1000):
        ids = rng.choices(range(300), k=rng.randrange(20))
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_ends_come_from_every_file(tmp_path: Path) -> None:
    """eos_token, generation_config.json and, without the latter, config.json name ends."""
    folder = byte_level_folder(tmp_path, eos={"content": SPECIAL[3], "special": True})
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert load(folder).eos_token_ids == (2, 3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    assert load(folder).eos_token_ids == (0, 3)


def test_unusable_folders_are_named(tmp_path: Path) -> None:
    """A missing or broken file, and a decoder that nobody knows, are one clear line."""
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be used"):
        load(tmp_path)
    byte_level_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": 3}')
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json cannot be used"):
        load(tmp_path)
    tokens, _ = trained()
    backend = Backend(models.WordLevel({token: index for index, token in enumerate(tokens)}, "a"))
    for decoder, words in ((decoders.WordPiece(), "WordPiece"), (None, r"\[\]")):
        backend.decoder = decoder
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(TokenizerError, match=f"decoder .*{words}.* is not supported"):
            load(tmp_path)
