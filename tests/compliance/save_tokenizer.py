"""The default model's tokenizer as the folder that lm-eval reads: save_tokenizer.py FOLDER."""

import sys

from transformers import AutoTokenizer

from cearx.core.model_source import resolve


def main(folder: str) -> None:
    path = resolve(None, lambda *_: None).path
    AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
