"""Small trained tokenizers, as GGUF files and as Hugging Face folders."""

import json
from functools import cache
from pathlib import Path

import numpy as np
from gguf_samples import add_tokenizer, write_gguf
from token_texts import FRAGMENTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaTokenizer

SPECIAL = ["<|endoftext|>", "<|begin|>", "<|im_start|>", "<|im_end|>"]
"""Control tokens, the first ids of every small vocabulary."""
USER_DEFINED = ["<tool_call>", "<|fim prefix|>", "<größe>"]
"""The last ids: words that the publisher added, which are not special."""


WHOLE_WORDS = ["Ġunmerged", "Wholeword"]
"""Tokens that no merges lead to, as Llama 3 has them; the awkward texts contain these words."""


def corpus() -> list[str]:
    """Text with code, digits and many scripts, without the WHOLE_WORDS."""
    sources = sorted((Path(__file__).parents[2] / "core").glob("*.py"))
    known = [text for text in FRAGMENTS if "Ġ" + text.strip() not in WHOLE_WORDS]
    known = [text for text in known if text not in WHOLE_WORDS]
    return [path.read_text() for path in sources] + known * 20


@cache
def trained(size: int = 1500) -> tuple[list[str], list[str]]:
    """Tokens (specials first) and merges of a byte-level BPE."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus(), trainer)
    saved = json.loads(backend.to_str())["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].get)
    return tokens, [" ".join(pair) for pair in saved["merges"]]


def gguf_tokenizer(path: Path, pre: str, tweak=lambda writer: None) -> Path:
    """A GGUF file with one tensor and a small tokenizer of the family `pre`."""
    tokens, merges = trained()
    tokens = tokens + (WHOLE_WORDS if pre.startswith("llama") else []) + USER_DEFINED
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - 3) + [4] * 3

    def fill(writer) -> None:
        add_tokenizer(writer, tokens, merges, types, pre)
        tweak(writer)

    return write_gguf(path, "llama", fill, {"w": np.zeros(4, np.float32)})


def byte_level_folder(folder: Path, eos: str | dict = SPECIAL[3]) -> Path:
    """A Hugging Face folder with a byte-level tokenizer.json that adds a BOS."""
    tokens, merges = trained()
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single=[SPECIAL[1], "$A"], special_tokens=[(SPECIAL[1], 1)]
    )
    backend.enable_truncation(5)
    backend.enable_padding(length=9, pad_id=0, pad_token=SPECIAL[0])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": eos}))
    return folder


def sentencepiece_folder(folder: Path) -> Path:
    """A Hugging Face folder with a Llama-2-like tokenizer: marks for spaces, bytes as fallback."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
        limit_alphabet=90,
    )
    sources = [line for text in corpus() for line in text.splitlines()]
    backend.train_from_iterator(sources, trainer)
    saved = json.loads(backend.to_str())["model"]
    merges = [tuple(pair) for pair in saved["merges"]]
    LlamaTokenizer(vocab=saved["vocab"], merges=merges).save_pretrained(folder)
    return folder
