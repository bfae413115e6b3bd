"""Reads the weights of a Hugging Face folder: one safetensors file, or shards with an index.

Owns file names, the index and the canonical tensor names (with the `model.` prefix, which some
publishers leave out). Files are memory-mapped; no format that can hold code is ever opened. Called
by the model loader.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cearx.core.child import StartupError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PREFIX = "model."
UNPREFIXED = ("lm_head.",)
"""Names that never carry the prefix."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class SafetensorsFolder:
    """A `WeightSource` over a folder; raises StartupError for what cannot be read."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        """`device` is where tensors are read to."""
        self._folder = folder
        self._device = device
        self._shards: dict[str, Any] = {}  # safe_open has no types
        index = folder / INDEX_FILE
        if (folder / SINGLE_FILE).is_file():
            stored = {name: SINGLE_FILE for name in self._shard(SINGLE_FILE).keys()}
        elif index.is_file():
            stored = self._read_index(index)
        else:
            raise StartupError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        prefixed = any(name.startswith(PREFIX) for name in stored)
        self._places = {_canonical(name, prefixed): (name, shard) for name, shard in stored.items()}

    def names(self) -> Iterable[str]:
        return self._places.keys()

    def get(self, name: str) -> Tensor:
        stored_name, shard = self._places[name]
        try:
            tensor: Tensor = self._shard(shard).get_tensor(stored_name)
        except SafetensorError as error:
            raise StartupError(f"{self._folder / shard}: {stored_name}: {error}") from error
        return tensor

    def _read_index(self, path: Path) -> dict[str, str]:
        try:
            weight_map = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
        except (OSError, msgspec.DecodeError) as error:
            raise StartupError(f"{path}: {error}") from error
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard or not (self._folder / shard).is_file():
                raise StartupError(f"{path} names {shard!r}, which is not a file of {self._folder}")
        return weight_map

    def _shard(self, file_name: str) -> Any:
        if file_name not in self._shards:
            path = self._folder / file_name
            try:
                self._shards[file_name] = safe_open(path, framework="pt", device=self._device)
            except (OSError, SafetensorError) as error:
                raise StartupError(f"{path}: {error}") from error
        return self._shards[file_name]


def _canonical(name: str, prefixed: bool) -> str:
    return name if prefixed or name.startswith(UNPREFIXED) else PREFIX + name
