"""A model folder without weights and without any download, for `cearx serve --load-format dummy`.

Owns a synthetic byte-level tokenizer of Qwen3's layout: 151,643 ordinary tokens, then Qwen's
special ones; common English words, pseudo-words and all their beginnings are one token each. The
chat template is ChatML, as short as Qwen3's. Everything comes from a fixed seed.

    python tests/support/make_dummy_model.py qwen3_8b /tmp/qwen3_8b
"""

import argparse
import json
import random
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cearx.frontend.bench.random_prompts import FIRST_WORD, WORDS

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"
NUM_ORDINARY = 151_643
SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>"
    " <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|>"
    " <|image_pad|> <|video_pad|>"
).split()
"""Ids from NUM_ORDINARY on."""
SPACE = "Ġ"
"""How byte-level vocabularies write a space."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}
"""Qwen3's recommendations."""
ONSETS = "b c d f g h j k l m n p r s t v w z br cl dr fl gr pl st tr th sh".split()
VOWELS = "a e i o u ai ea ou".split()
CODAS = ["", "", "n", "r", "s", "t", "l", "m", "ck", "nd"]


def pseudo_word(source: random.Random) -> str:
    syllables = source.randint(1, 3)
    return "".join(
        source.choice(ONSETS) + source.choice(VOWELS) + source.choice(CODAS)
        for _ in range(syllables)
    )


def build_tokenizer(num_ordinary: int = NUM_ORDINARY) -> Tokenizer:
    """Bytes, then chains: each word's beginnings, one merge a letter.

    Words with a space before them come first and their merges only ever join a beginning that
    starts with the space, so no merge of another word can get between; the template's bare words
    come last for the same reason.
    """
    bare = [FIRST_WORD, "user", "assistant", "system"]
    vocabulary = {byte: index for index, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    merges: list[tuple[str, str]] = []

    def add(word: str, limit: int) -> None:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary and len(vocabulary) < limit:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))

    reserved = sum(len(word) - 1 for word in bare)
    for word in WORDS:
        add(SPACE + word, num_ordinary - reserved)
    source = random.Random(0)
    while len(vocabulary) < num_ordinary - reserved:
        add(SPACE + pseudo_word(source), num_ordinary - reserved)
    for word in bare:
        add(word, num_ordinary)
    while len(vocabulary) < num_ordinary:  # bare words that begin alike share tokens
        vocabulary[f"<unused{len(vocabulary)}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def make_dummy_model(config: Path, folder: Path) -> Path:
    """Fills the folder; `config` is a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config, folder / "config.json")
    build_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=1))
    return folder


def find_config(size: str) -> Path:
    """A name below tests/benchmarks/models, or the path of a config.json."""
    known = MODELS / size / "config.json"
    return known if known.is_file() else Path(size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", help="qwen3_8b, qwen3_0.6b, or the path of a config.json")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(make_dummy_model(find_config(options.size), options.folder))
