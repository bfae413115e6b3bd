"""The stream of text against decoding everything at once, however the ids are cut."""

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import SPECIAL, USER_DEFINED, gguf_tokenizer, sentencepiece_folder
from token_texts import texts

from cearx.core.config import ModelFiles
from cearx.frontend.detokenizer import IncrementalDetokenizer
from cearx.frontend.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "byte-level":
        path = gguf_tokenizer(folder / "t.gguf", "smollm")
    else:
        path = sentencepiece_folder(folder)
    return load_tokenizer(ModelFiles(path=path, name="test"))


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """byte -> an id that stands for this byte alone."""
    found: dict[int, int] = {}
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token_id)
        if len(data) == 1 and not tokenizer.is_special(token_id):
            found.setdefault(data[0], token_id)
    assert len(found) == 256
    return found


def stream(detokenizer: IncrementalDetokenizer, parts: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(part) for part in parts), detokenizer.finish()]


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(position % (len(ids) + 1) for position in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


ID = st.one_of(st.integers(0, 330), st.integers(0, 1600), st.integers(-2, 1 << 33))
"""Mostly single bytes and specials, which make broken UTF-8; and ids that do not exist."""


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(ID, max_size=40), cuts=st.lists(st.integers(0, 40)), skip=st.booleans())
def test_any_cut_joins_to_the_whole(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Random ids in random pieces give the text of decoding once, with and without specials."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = stream(detokenizer, cut(ids, cuts))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_no_replacement_while_a_character_comes(tokenizer: Tokenizer) -> None:
    """Token by token, valid text never shows U+FFFD and comes as soon as it is complete."""
    for text in texts(500, seed=1, extra=SPECIAL + USER_DEFINED):
        if "\ufffd" in text:
            continue
        ids = tokenizer.encode(text)
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        data, shown = b"", ""
        for token_id in ids:
            piece = detokenizer.push((token_id,))
            assert "\ufffd" not in piece
            shown += piece
            data += tokenizer.token_bytes(token_id)
            complete = data.decode("utf-8", "ignore")
            assert shown.lstrip(" ") == complete.lstrip(" "), "nothing complete is held back"
        assert shown + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=False)


def test_every_broken_sequence_of_three_bytes(tokenizer: Tokenizer) -> None:
    """Invalid bytes become as many U+FFFD as decoding the whole gives, in every position."""
    ids = byte_ids(tokenizer)
    interesting = [
        0x41,
        0x80,
        0x9F,
        0xA0,
        0xBF,
        0xC0,
        0xC3,
        0xE0,
        0xE4,
        0xED,
        0xF0,
        0xF4,
        0xF5,
        0xFF,
    ]
    for data in itertools.product(interesting, repeat=3):
        detokenizer = IncrementalDetokenizer(tokenizer)
        shown = "".join(stream(detokenizer, [[ids[byte]] for byte in data]))
        assert shown == bytes(data).decode("utf-8", "replace")


def expected_after(prompt: bytes, output: bytes) -> str:
    """The text of `output` behind `prompt`, from a decoder that knows whose byte each one is.

    A character, valid or broken, belongs to the output when its last byte does.
    """
    whole = prompt + output
    text, position = "", 0
    while position < len(whole):
        for size in range(min(4, len(whole) - position), 0, -1):
            try:
                character = whole[position : position + size].decode()
            except UnicodeDecodeError as error:
                # The longest beginning that could have become a character is one U+FFFD.
                if error.start or error.end != size or error.reason == "invalid start byte":
                    if size > 1:
                        continue
                character = "\ufffd"
            if len(character) == 1:
                break
        if position + size > len(prompt):
            text += character
        position += size
    return text


@settings(max_examples=400, deadline=None)
@given(
    prompt=st.binary(max_size=6)
    | st.sampled_from(["中", "😀", "é"]).map(lambda c: c.encode()[:-1]),
    output=st.binary(max_size=6) | st.sampled_from([b"\xad", b"\x98\x80", b"\xa9", b"A"]),
    cuts=st.lists(st.integers(0, 6)),
)
def test_prompt_text_never_leaks(
    tokenizer: Tokenizer, prompt: bytes, output: bytes, cuts: list[int]
) -> None:
    """Only characters that end in the output come out, whatever the prompt ends with."""
    ids = byte_ids(tokenizer)
    tail = [ids[byte] for byte in b"x" + prompt]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_tail=tail)
    pieces = stream(detokenizer, cut([ids[byte] for byte in output], cuts))
    assert "".join(pieces) == expected_after(b"x" + prompt, output)


def test_character_split_between_prompt_and_output(tokenizer: Tokenizer) -> None:
    """Completed by the output it comes whole; broken by the prompt it does not come at all."""
    ids = byte_ids(tokenizer)
    begun = [ids[0x20], ids[0xF0], ids[0x9F]]

    def after(output: bytes) -> list[str]:
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_tail=begun)
        return stream(detokenizer, [[ids[byte]] for byte in output])

    assert after(b"\x98\x80!") == ["", "😀", "!", ""]
    assert after(b"A") == ["A", ""]
    assert after(b"\x98A") == ["", "\ufffdA", ""]
    assert after(b"") == [""]


@pytest.mark.parametrize("output", [b"\xa0", b"\xbf", b"\xa0A", b"\xa0\x80", b"\x9f\xbf"])
def test_half_a_surrogate_between_prompt_and_output(tokenizer: Tokenizer, output: bytes) -> None:
    """Bytes of a surrogate are no character, so the prompt's one does not come out with them."""
    ids = byte_ids(tokenizer)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_tail=[ids[0x78], ids[0xED]])
    shown = "".join(stream(detokenizer, [[ids[byte]] for byte in output]))
    assert shown == expected_after(b"x\xed", output)


def test_whole_prompt_or_its_last_ids(tokenizer: Tokenizer) -> None:
    """Eight ids of the prompt are enough; special ones between the bytes do not count."""
    rng = random.Random(0)
    ids = byte_ids(tokenizer)
    for text in texts(200, seed=2):
        prompt = tokenizer.encode(text) + [ids[0xE4], 2, ids[0xB8]][: rng.randrange(4)]
        outputs = []
        for tail in (prompt, prompt[-8:]):
            detokenizer = IncrementalDetokenizer(tokenizer, prompt_tail=tail)
            outputs.append(stream(detokenizer, [[ids[0xAD]], [ids[0x41]]]))
        assert outputs[0] == outputs[1]


def test_leading_space_belongs_to_the_prompt_only_at_the_start(tmp_path: Path) -> None:
    """SentencePiece drops the first space of a text; an answer's first word keeps its space."""
    tokenizer = load_tokenizer(ModelFiles(path=sentencepiece_folder(tmp_path), name="test"))
    ids = tokenizer.encode("the end", add_special_tokens=False)
    assert IncrementalDetokenizer(tokenizer).push(ids) == "the end"
    assert IncrementalDetokenizer(tokenizer, prompt_tail=ids).push(ids) == " the end"
