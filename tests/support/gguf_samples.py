"""Writes GGUF files for tests, with the `gguf` package's own writer."""

from pathlib import Path

import gguf
import numpy as np


def write_gguf(path: Path, architecture: str, fill, tensors: dict[str, np.ndarray]) -> Path:
    """Writes a file; `fill(writer)` adds metadata, `tensors` are float arrays."""
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(
    writer: gguf.GGUFWriter,
    tokens: list[str],
    merges: list[str],
    types: list[int],
    pre: str,
) -> None:
    """Metadata of a byte-level BPE tokenizer."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(types)
