"""Token ids against plain-Python BPE, transformers and the default model's own metadata."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gguf_samples import write_gguf
from slow_bpe import SlowTokenizer, alphabet
from small_tokenizers import SPECIAL, USER_DEFINED, gguf_tokenizer, trained
from token_texts import texts
from transformers import Qwen2Tokenizer

from cearx.core.config import ModelFiles
from cearx.core.gguf_file import GGUFFile
from cearx.core.model_source import resolve
from cearx.frontend.gguf_tokenizer import PRE_TOKENIZERS
from cearx.frontend.token_bytes import TokenizerError, byte_alphabet
from cearx.frontend.tokenizer import Tokenizer, load_tokenizer


def load(path: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles(path=path, name="test"))


def slow(path: Path, pre: str) -> SlowTokenizer:
    file = GGUFFile(path)
    return SlowTokenizer(
        file.get("tokenizer.ggml.tokens"),
        file.get("tokenizer.ggml.merges"),
        file.get("tokenizer.ggml.token_type").tolist(),
        pre,
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of the default model's family."""
    return gguf_tokenizer(tmp_path_factory.mktemp("small") / "t.gguf", "smollm")


def test_byte_alphabet() -> None:
    """Every byte has its character, as GPT-2's publication builds them."""
    assert byte_alphabet() == {character: byte for byte, character in alphabet().items()}


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe", "default"])
def test_ids_equal_the_definition(pre: str, tmp_path: Path) -> None:
    """Thousands of awkward texts give the ids of reference cuts and plain merging."""
    path = gguf_tokenizer(tmp_path / "t.gguf", pre)
    tokenizer, oracle = load(path), slow(path, pre)
    for text in texts(1500, seed=1, extra=SPECIAL + USER_DEFINED):
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text), text


def test_whole_words_of_llama3(tmp_path: Path) -> None:
    """A piece that is a token is taken whole there, though no merges lead to it."""
    tokenizer = load(gguf_tokenizer(tmp_path / "t.gguf", "llama-bpe"))
    ids = tokenizer.encode("Wholeword unmerged", add_special_tokens=False)
    assert list(map(tokenizer.token_bytes, ids)) == [b"Wholeword", b" unmerged"]


def test_families_differ(tmp_path: Path) -> None:
    """The texts above tell the families apart, so that a mixed-up table cannot pass."""
    ids = {}
    for pre in ("smollm", "gpt-2", "qwen2", "llama-bpe", "default"):
        oracle = slow(gguf_tokenizer(tmp_path / f"{pre}.gguf", pre), pre)
        ids[pre] = str([oracle.encode(text) for text in texts(300, seed=1)])
    assert len(set(ids.values())) == len(ids)


def test_qwen2_equals_transformers(tmp_path: Path) -> None:
    """The family's own class, built from the same vocabulary, gives the same ids."""
    tokens, merges = trained()
    tokens = tokens + USER_DEFINED
    vocab = {token: index for index, token in enumerate(tokens)}
    theirs = Qwen2Tokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
    theirs.add_tokens(USER_DEFINED)
    theirs.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer = load(gguf_tokenizer(tmp_path / "t.gguf", "qwen2"))
    for text in texts(1500, seed=2, extra=SPECIAL):
        assert tokenizer.encode(text) == theirs.encode(text), text
        assert tokenizer.encode("e\u0301" + text) == theirs.encode("é" + text)


@pytest.mark.model
def test_default_model_ids() -> None:
    """The default model's 49,152 tokens and 48,900 merges against the definition."""
    files = resolve(None, lambda stage, completed, total: None)
    tokenizer, oracle = load_tokenizer(files), slow(files.path, "smollm")
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>"]
    for text in texts(4000, seed=3, extra=special):
        assert tokenizer.encode(text) == oracle.encode(text), text
    assert tokenizer.encode("In 1984<|im_end|>") == [788, 216, 33, 41, 40, 36, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_token_ids == (0, 2)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.is_special(1) and not tokenizer.is_special(788)


def test_special_tokens_in_text(small: Path) -> None:
    """Written-out special tokens become ids or stay characters; added words are always found."""
    tokenizer = load(small)
    text = f"a{SPECIAL[3]}b{USER_DEFINED[0]}c"
    end, added = tokenizer.encode(SPECIAL[3])[0], tokenizer.encode(USER_DEFINED[0])[0]
    assert tokenizer.is_special(end) and not tokenizer.is_special(added)
    parsed = tokenizer.encode(text)
    plain = tokenizer.encode(text, parse_special=False)
    assert end in parsed and added in parsed
    assert end not in plain and added in plain
    assert not any(tokenizer.is_special(token_id) for token_id in plain)
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(parsed) == f"ab{USER_DEFINED[0]}c"
    assert tokenizer.decode(parsed, skip_special_tokens=False) == text


def test_decode_returns_the_text(small: Path) -> None:
    """Text to ids to text is the identity, and equals the join of the tokens' bytes."""
    tokenizer = load(small)
    for text in texts(1000, seed=4, extra=SPECIAL + USER_DEFINED):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_ids_outside_the_vocabulary(small: Path) -> None:
    """Padding rows of an output layer have no text and break nothing."""
    tokenizer = load(small)
    for token_id in (-1, tokenizer.vocab_size, 1 << 31, 1 << 40):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.decode([token_id]) == ""
        assert not tokenizer.is_special(token_id)


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", True, True),
     ("smollm", None, False)],
)  # fmt: skip
def test_bos_is_added_where_the_file_says(
    pre: str, flag: bool | None, adds: bool, tmp_path: Path
) -> None:
    """add_bos_token decides, else the family; without special tokens nothing is added."""

    def tweak(writer) -> None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(3)
        if flag is not None:
            writer.add_add_bos_token(flag)

    tokenizer = load(gguf_tokenizer(tmp_path / "t.gguf", pre, tweak))
    bare = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == ([1, *bare] if adds else bare)
    assert (tokenizer.bos_token_id, tokenizer.bos_token) == (1, SPECIAL[1])


def test_all_ends_of_a_generation(tmp_path: Path) -> None:
    """The named end, the end of turn and control tokens known to end a text all end it."""

    def tweak(writer) -> None:
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(1)

    tokenizer = load(gguf_tokenizer(tmp_path / "t.gguf", "qwen2", tweak))
    assert tokenizer.eos_token_id == 2
    assert tokenizer.eos_token_ids == (0, 1, 2, 3), "endoftext, eot, eos, im_end"


def test_unusable_metadata_is_named(tmp_path: Path) -> None:
    """An unknown pre-tokenizer names the supported ones; broken tables name their key."""
    tokens, merges = trained()

    def attempt(words: str, **changes: object) -> None:
        parts = {
            "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges,
            "types": [1] * len(tokens), "eos": 0, **changes,
        }  # fmt: skip

        def fill(writer) -> None:
            writer.add_tokenizer_model(parts["model"])
            if parts["pre"]:
                writer.add_tokenizer_pre(parts["pre"])
            writer.add_token_list(parts["tokens"])
            writer.add_token_merges(parts["merges"])
            writer.add_token_types(parts["types"])
            writer.add_eos_token_id(parts["eos"])

        path = tmp_path / f"{abs(hash(words))}.gguf"
        with pytest.raises(TokenizerError) as error:
            load(write_gguf(path, "llama", fill, {}))
        assert words in str(error.value) and "\n" not in str(error.value)

    attempt(f"'tekken' is not supported; supported: {', '.join(PRE_TOKENIZERS)}", pre="tekken")
    attempt("pre-tokenizer None is not supported", pre=None)
    attempt("tokenizer 'llama' is not supported", model="llama")
    attempt("same token twice", tokens=[*tokens[:-1], tokens[0]])
    attempt("token_type must have", types=[1, 2, 3])
    attempt("tokenizer.ggml.merges: ", merges=["a b c"])
    attempt("tokenizer.ggml.merges: ", merges=["never seen"])
    attempt(f"must be in 0..{len(tokens) - 1}, got {len(tokens)}", eos=len(tokens))


def test_threads_agree(small: Path) -> None:
    """Eight threads that encode and decode at once get what one gets."""
    tokenizer = load(small)
    samples = texts(300, seed=5, extra=SPECIAL)
    alone = load(small)
    expected = [alone.encode(text) for text in samples]
    barrier = threading.Barrier(8)

    def work(_: int) -> list[list[int]]:
        barrier.wait()
        found = [tokenizer.encode(text) for text in samples]
        for text, ids in zip(samples, found, strict=True):
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
        return found

    with ThreadPoolExecutor(8) as pool:
        assert all(found == expected for found in pool.map(work, range(8)))


@pytest.mark.parametrize("character", ["a", " ", "\n", "é", "😀", "ab ", " \n", "!"])
def test_long_texts_take_linear_time(small: Path, character: str) -> None:
    """Half a MiB of one repeated pattern is encoded in seconds and comes back whole."""
    tokenizer = load(small)
    text = character * ((1 << 19) // len(character.encode()))
    assert tokenizer.decode(tokenizer.encode(text)) == text
