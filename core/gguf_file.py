"""Reads GGUF files (versions 2 and 3): metadata, tensor table, tensors as float32 arrays.

Owns the memory map and every check that stands between a damaged file and the rest of us; the block
formats themselves are `gguf.quants`. Written because the package's reader takes seconds for a
vocabulary (it makes several arrays a string). Called by the tokenizer and the weight loader.
Never writes, never imports torch. The file must not shrink while it is mapped.
"""

import math
import mmap
import struct
from pathlib import Path

import msgspec
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, quants
from numpy.typing import NDArray

from cearx.core.child import StartupError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 65536
MAX_TENSORS = 1 << 16
MAX_KEYS = 1 << 16
MAX_ITEMS = 1 << 23
"""Array items of the whole metadata; a vocabulary of 256k with its merges has 1.1 million."""
MAX_STRING_BYTES = 1 << 28
"""Bytes of all strings in the metadata together."""
CHUNK_VALUES = 1 << 17
"""Values that are dequantised at once: bounds the temporaries and keeps them in the cache."""

Scalar = bool | int | float | str
MetadataArray = list[str] | NDArray[np.generic]
Value = Scalar | MetadataArray

_SCALARS: dict[int, struct.Struct] = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_U32 = _SCALARS[GGUFValueType.UINT32]
_U64 = _SCALARS[GGUFValueType.UINT64]


class GGUFError(StartupError):
    """The file cannot be used; the message is one line that names it and what is wrong."""


class GGUFTensor(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    shape: tuple[int, ...]
    """Row-major, as numpy and torch see it (the file lists the dimensions the other way round)."""
    kind: GGMLQuantizationType
    offset: int
    """Of its first byte in the file."""
    num_bytes: int


class GGUFFile:
    """One mapped file; raises GGUFError for whatever is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise GGUFError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise GGUFError(f"{path} is empty") from error
        try:
            cursor = _Cursor(self._map)
            num_tensors, num_keys = _read_header(cursor)
            self.metadata = _read_metadata(cursor, num_keys)
            self.tensors = _read_tensor_table(cursor, num_tensors, self.get("general.alignment"))
        except _Damage as damage:
            raise GGUFError(f"{path} cannot be used: {damage}") from None

    def get(self, key: str) -> Value | None:
        return self.metadata.get(key)

    def array(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32, in its shape; raises GGUFError for a format that nobody decodes.

        An F32 tensor is a read-only view of the map, every other one is a fresh array.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise GGUFError(f"{self.path} has no tensor {name!r}")
        # Blocks do not depend on each other, so rows play no part: one long row a chunk is fastest.
        blocks = self.blocks(name)
        if tensor.kind == GGMLQuantizationType.F32:
            return blocks.view("<f4").reshape(tensor.shape)
        block_values = GGML_QUANT_SIZES[tensor.kind][0]
        out = np.empty((len(blocks), block_values), np.float32)
        stride = max(1, CHUNK_VALUES // block_values)
        for start in range(0, len(blocks), stride):
            chunk = blocks[start : start + stride].reshape(1, -1)
            try:
                values = quants.dequantize(chunk, tensor.kind)
            except NotImplementedError as error:
                raise GGUFError(
                    f"{self.path}: tensor {name!r} is {tensor.kind.name}, which cannot be decoded"
                ) from error
            out[start : start + stride] = values.reshape(-1, block_values)
        return out.reshape(tensor.shape)

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor that the file has, [blocks, bytes of a block], as a view."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        return raw.reshape(-1, GGML_QUANT_SIZES[tensor.kind][1])


class _Damage(Exception):
    """What is wrong with the file, without its name."""


class _Cursor:
    """A position in the map; every read is checked against the file's end and the budgets."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0
        self.size = len(data)
        self.items_left = MAX_ITEMS
        self.string_bytes_left = MAX_STRING_BYTES

    def take(self, num_bytes: int, what: str) -> int:
        """Moves over `num_bytes` and answers where they start."""
        start = self.position
        if num_bytes > self.size - start:
            raise _Damage(
                f"it ends inside {what} ({num_bytes} bytes at offset {start}, "
                f"the file has {self.size})"
            )
        self.position = start + num_bytes
        return start

    def scalar(self, layout: struct.Struct, what: str) -> bool | int | float:
        value: bool | int | float = layout.unpack_from(self.data, self.take(layout.size, what))[0]
        return value

    def count(self, layout: struct.Struct, limit: int, what: str) -> int:
        count = int(self.scalar(layout, what))
        if count > limit:
            raise _Damage(f"{what} is {count}, the limit is {limit}")
        return count

    def string(self, limit: int, what: str) -> str:
        length = self.count(_U64, limit, f"the length of {what}")
        self.string_bytes_left -= length
        if self.string_bytes_left < 0:
            raise _Damage(f"its strings take more than {MAX_STRING_BYTES} bytes")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise _Damage(f"{what} is not UTF-8 (at offset {start})") from None

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings in a row; one tight loop, as vocabularies have 150,000 of them."""
        data, unpack, position = self.data, _U64.unpack_from, self.position
        first, found = position, []
        end_max = min(self.size, position + 8 * count + self.string_bytes_left)
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > end_max:
                    raise _Damage(f"it ends inside {what} or {what} takes too many bytes")
                found.append(data[start:position].decode())
        except struct.error:
            raise _Damage(f"it ends inside {what}") from None
        except UnicodeDecodeError:
            raise _Damage(f"item {len(found)} of {what} is not UTF-8") from None
        self.position = position
        self.string_bytes_left -= position - first - 8 * count
        return found


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    start = cursor.take(4, "the magic number")
    magic = cursor.data[start : start + 4]
    if magic != MAGIC:
        raise _Damage(f"it does not start with {MAGIC!r} but with {magic!r}")
    version = int(cursor.scalar(_U32, "the version"))
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS:
            raise _Damage("it is big-endian; only little-endian files are supported")
        raise _Damage(f"its version is {version}, supported are {VERSIONS}")
    num_tensors = cursor.count(_U64, MAX_TENSORS, "the number of tensors")
    num_keys = cursor.count(_U64, MAX_KEYS, "the number of metadata keys")
    return num_tensors, num_keys


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.string(MAX_NAME_BYTES, "a metadata key")
        if key in metadata:
            raise _Damage(f"the metadata key {key!r} stands twice")
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Value:
    what = f"the value of {key!r}"
    kind = int(cursor.scalar(_U32, what))
    if kind == GGUFValueType.STRING:
        return cursor.string(MAX_STRING_BYTES, what)
    if kind != GGUFValueType.ARRAY:
        return cursor.scalar(_scalar_layout(kind, what), what)
    item_kind = int(cursor.scalar(_U32, what))
    count = cursor.count(_U64, cursor.items_left, f"the number of items of {key!r}")
    cursor.items_left -= count
    if item_kind == GGUFValueType.STRING:
        return cursor.strings(count, what)
    layout = _scalar_layout(item_kind, what)
    start = cursor.take(count * layout.size, what)
    return np.frombuffer(cursor.data, np.dtype(layout.format), count, start).copy()


def _scalar_layout(kind: int, what: str) -> struct.Struct:
    layout = _SCALARS.get(kind)
    if layout is None:
        raise _Damage(f"{what} has the unsupported type {kind}")
    return layout


def _read_tensor_table(
    cursor: _Cursor, num_tensors: int, alignment: Value | None
) -> dict[str, GGUFTensor]:
    if alignment is None:
        alignment = DEFAULT_ALIGNMENT
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise _Damage(f"general.alignment must be a power of two, it is {alignment!r}")
    entries = [_read_tensor_entry(cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for entry in entries:
        offset = data_start + entry.offset
        if entry.offset % alignment or offset + entry.num_bytes > cursor.size:
            raise _Damage(
                f"tensor {entry.name!r} has {entry.num_bytes} bytes at offset {offset}: not inside "
                f"the file of {cursor.size} bytes, or not aligned to {alignment}"
            )
        if entry.name in tensors:
            raise _Damage(f"tensor {entry.name!r} stands twice")
        tensors[entry.name] = msgspec.structs.replace(entry, offset=offset)
    return tensors


def _read_tensor_entry(cursor: _Cursor) -> GGUFTensor:
    name = cursor.string(MAX_NAME_BYTES, "a tensor name")
    what = f"the entry of tensor {name!r}"
    num_dims = cursor.count(_U32, MAX_DIMS, f"the number of dimensions of {name!r}")
    dims = [int(cursor.scalar(_U64, what)) for _ in range(num_dims)]
    kind_id = int(cursor.scalar(_U32, what))
    offset = int(cursor.scalar(_U64, what))
    try:
        kind = GGMLQuantizationType(kind_id)
    except ValueError:
        raise _Damage(f"tensor {name!r} has the unknown type {kind_id}") from None
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    if not dims or min(dims) < 1 or dims[0] % block_values:
        raise _Damage(
            f"tensor {name!r} has the dimensions {dims}; {kind.name} needs rows of a multiple "
            f"of {block_values}"
        )
    num_bytes = math.prod(dims) // block_values * block_bytes
    return GGUFTensor(
        name=name, shape=tuple(reversed(dims)), kind=kind, offset=offset, num_bytes=num_bytes
    )
