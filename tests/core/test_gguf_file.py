"""The GGUF reader against the package's own reader and quantisers, and against damage."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_samples import add_tokenizer, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from cearx.core import gguf_file
from cearx.core.gguf_file import GGUFError, GGUFFile

EXACT_KINDS = [Kind.F32, Kind.F16]
"""Decoded by numpy alone."""
QUANTISED = [
    kind
    for kind in Kind
    if kind in gguf.quants._type_traits  # what the package can decode
]


def sample_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 1 << 31)
    writer.add_int32("a.i32", -(1 << 30))
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 62))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "tokens: Ġ 中 😀")
    writer.add_array("a.strings", ["", "x", "Ġthe", "中" * 50])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_array("a.bools", [True, False])


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        "one": rng.standard_normal((3, 5), np.float32),
        "two": rng.standard_normal(7).astype(np.float16),
    }
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    return write_gguf(path, "test", sample_metadata, tensors)


def test_metadata_equals_the_package(sample: Path) -> None:
    """Every value type comes out as the package's reader gives it."""
    ours = GGUFFile(sample)
    fields = gguf.GGUFReader(sample).fields
    expected = {key: field for key, field in fields.items() if not key.startswith("GGUF.")}
    assert list(ours.metadata) == list(expected)
    for key, field in expected.items():
        value = ours.metadata[key]
        value = value.tolist() if isinstance(value, np.ndarray) else value
        assert value == field.contents(), key
        assert type(value) is type(field.contents()), key


def test_tensor_table_equals_the_package(sample: Path) -> None:
    """Names, shapes (row-major), kinds and places are the package's."""
    ours = GGUFFile(sample)
    theirs = gguf.GGUFReader(sample).tensors
    assert [tensor.name for tensor in theirs] == list(ours.tensors)
    for tensor in theirs:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.kind, mine.offset) == (tensor.tensor_type, tensor.data_offset)
        np.testing.assert_array_equal(ours.array(tensor.name), tensor.data.astype(np.float32))


@pytest.mark.parametrize("kind", [*EXACT_KINDS, *QUANTISED], ids=lambda kind: kind.name)
def test_every_format_decodes_like_the_package(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round trip of each block format, decoded in one piece and in pieces of a few rows."""
    rng = np.random.default_rng(kind)
    values = rng.standard_normal((2, 19, 512)).astype(np.float32)
    try:
        raw = gguf.quants.quantize(values, kind)
    except NotImplementedError:  # the package only decodes these: any bytes are valid blocks
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 100, (2, 19, 512 // block * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "test")
    writer.add_tensor("before", np.ones(3, np.float32))
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = next(t for t in gguf.GGUFReader(tmp_path / "q.gguf").tensors if t.name == "w")
    expected = gguf.quants.dequantize(theirs.data, kind).reshape(values.shape)
    for chunk in (1 << 17, 512 * 7, 1):
        monkeypatch.setattr(gguf_file, "CHUNK_VALUES", chunk)
        found = GGUFFile(tmp_path / "q.gguf").array("w")
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
    assert np.isfinite(expected).all() and expected.std() > 0


def test_large_vocabulary_is_fast(tmp_path: Path) -> None:
    """150,000 tokens and merges open in a fraction of a second (the package's reader: 10 s)."""
    tokens = [f"Ġtoken{index}" for index in range(150_000)]
    merges = [f"Ġt oken{index}" for index in range(150_000)]
    path = write_gguf(
        tmp_path / "v.gguf",
        "test",
        lambda writer: add_tokenizer(writer, tokens, merges, [1] * len(tokens), "qwen2"),
        {"w": np.zeros(4, np.float32)},
    )
    seconds = []
    for _ in range(3):
        start = time.process_time()
        file = GGUFFile(path)
        seconds.append(time.process_time() - start)
    assert file.get("tokenizer.ggml.tokens") == tokens
    assert file.get("tokenizer.ggml.merges") == merges
    assert min(seconds) < 0.5, seconds


def patched(sample: Path, tmp_path: Path, offset: int, data: bytes) -> Path:
    content = bytearray(sample.read_bytes())
    content[offset : offset + len(data)] = data
    path = tmp_path / "patched.gguf"
    path.write_bytes(content)
    return path


HUGE = struct.pack("<Q", (1 << 64) - 1)


@pytest.mark.parametrize(
    ("offset", "data", "words"),
    [
        (0, b"GGML", "does not start with"),
        (4, struct.pack("<I", 1), "version is 1"),
        (4, struct.pack("<I", 99), "version is 99"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, HUGE, "number of tensors is 18446744073709551615, the limit is 65536"),
        (16, HUGE, "number of metadata keys is 18446744073709551615, the limit is 65536"),
        (16, struct.pack("<Q", 60000), "metadata"),
        (24, HUGE, "length of a metadata key"),
        (24, struct.pack("<Q", 60000), "ends inside a metadata key"),
    ],
)
def test_hostile_header_is_one_clear_line(
    sample: Path, tmp_path: Path, offset: int, data: bytes, words: str
) -> None:
    """Wrong magic, versions and counts are named with value and limit."""
    path = patched(sample, tmp_path, offset, data)
    with pytest.raises(GGUFError) as error:
        GGUFFile(path)
    assert words in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


def find(sample: Path, name: str) -> int:
    """Offset just behind the only place where `name` stands with its length before it."""
    content = sample.read_bytes()
    needle = struct.pack("<Q", len(name)) + name.encode()
    assert content.count(needle) == 1
    return content.index(needle) + len(needle)


@pytest.mark.parametrize(
    ("behind", "skip", "data", "words"),
    [
        ("a.u8", 0, struct.pack("<I", 77), "unsupported type 77"),
        ("a.text", 4, HUGE, "length of the value of 'a.text'"),
        ("a.text", 4, struct.pack("<Q", 1 << 20), "ends inside the value of 'a.text'"),
        ("a.text", 12, b"\xff", "not UTF-8"),
        ("a.strings", 4, struct.pack("<I", 9), "unsupported type 9"),
        ("a.strings", 8, HUGE, "number of items"),
        ("a.strings", 8, struct.pack("<Q", 1 << 22), "ends inside the value of 'a.strings'"),
        ("a.strings", 16, HUGE, "ends inside the value of 'a.strings'"),
        ("a.ints", 8, HUGE, "number of items"),
        ("a.ints", 8, struct.pack("<Q", 1 << 22), "ends inside the value of 'a.ints'"),
        ("one", 0, struct.pack("<I", 5), "number of dimensions of 'one' is 5, the limit is 4"),
        ("one", 0, struct.pack("<IIQ", 0, 0, 0), "dimensions []"),
        ("one", 4, struct.pack("<Q", 0), "dimensions [0, 3]"),
        ("one", 4, HUGE, "not inside"),
        ("one", 20, struct.pack("<I", 500), "unknown type 500"),
        ("one", 20, struct.pack("<I", int(Kind.Q8_0)), "multiple of 32"),
        ("one", 24, struct.pack("<Q", 1 << 40), "not inside"),
        ("one", 24, struct.pack("<Q", 1), "not aligned to 32"),
    ],
)
def test_hostile_field_is_one_clear_line(
    sample: Path, tmp_path: Path, behind: str, skip: int, data: bytes, words: str
) -> None:
    """Types, lengths, dimensions and offsets are checked before they are used."""
    path = patched(sample, tmp_path, find(sample, behind) + skip, data)
    tracemalloc.start()
    with pytest.raises(GGUFError) as error:
        GGUFFile(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert words in str(error.value) and "\n" not in str(error.value)
    assert peak < 4 << 20, "memory follows the file's size, not the counts that it claims"


def test_every_cut_is_an_error(sample: Path, tmp_path: Path) -> None:
    """A file that ends anywhere before its last tensor's end is refused."""
    content = sample.read_bytes()
    last = max(GGUFFile(sample).tensors.values(), key=lambda tensor: tensor.offset)
    path = tmp_path / "cut.gguf"
    for size in range(last.offset + last.num_bytes):
        path.write_bytes(content[:size])
        with pytest.raises(GGUFError):
            GGUFFile(path)
    path.write_bytes(content[: last.offset + last.num_bytes])
    GGUFFile(path)


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 900), st.binary(min_size=1, max_size=8))))
def test_random_damage_never_crashes(
    sample: Path, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]
) -> None:
    """Whatever bytes change, the file opens and decodes or GGUFError is raised."""
    content = bytearray(sample.read_bytes())
    for offset, data in changes:
        content[offset : offset + len(data)] = data
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    path.write_bytes(content)
    try:
        file = GGUFFile(path)
        for name in file.tensors:
            with np.errstate(all="ignore"):
                file.array(name)
    except GGUFError:
        pass


def test_missing_and_empty_files(tmp_path: Path) -> None:
    """A path that leads nowhere, to a folder or to nothing is one clear line."""
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(GGUFError, match="is empty"):
        GGUFFile(tmp_path / "empty.gguf")
    with pytest.raises(GGUFError, match="No such file"):
        GGUFFile(tmp_path / "missing.gguf")
    with pytest.raises(GGUFError, match="Is a directory"):
        GGUFFile(tmp_path)


def test_unknown_tensor_and_undecodable_format(sample: Path, tmp_path: Path) -> None:
    """A name that is not there, and a format that the package cannot decode, are named."""
    with pytest.raises(GGUFError, match="no tensor 'three'"):
        GGUFFile(sample).array("three")
    integers = find(sample, "two") + 12
    path = patched(sample, tmp_path, integers, struct.pack("<I", int(Kind.I16)))
    with pytest.raises(GGUFError, match="'two' is I16, which cannot be decoded"):
        GGUFFile(path).array("two")
