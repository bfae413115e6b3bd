"""Sampling defaults from the files that publishers write."""

import json
from pathlib import Path

import msgspec
import pytest
from gguf_samples import write_gguf
from transformers import GenerationConfig

from cearx.core.config import ModelFiles
from cearx.frontend.generation_defaults import (
    GenerationConfigError,
    GenerationDefaults,
    load_generation_defaults,
)


def load(path: Path) -> GenerationDefaults:
    return load_generation_defaults(ModelFiles(path=path, name="test"))


def test_absent_is_openai(tmp_path: Path) -> None:
    """No file, and a file that says nothing of sampling, mean the defaults of the API."""
    neutral = GenerationDefaults()
    assert (neutral.temperature, neutral.top_p, neutral.top_k) == (1.0, 1.0, 0)
    assert (neutral.min_p, neutral.repetition_penalty) == (0.0, 1.0)
    assert load(tmp_path) == neutral
    (tmp_path / "generation_config.json").write_text('{"_from_model_config": true, "top_k": null}')
    assert load(tmp_path) == neutral


def test_what_transformers_writes(tmp_path: Path) -> None:
    """A file saved by transformers is read value by value."""
    GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.95, top_k=20, min_p=0.01,
        repetition_penalty=1.05, eos_token_id=[7, 5],
    ).save_pretrained(tmp_path)  # fmt: skip
    assert load(tmp_path) == GenerationDefaults(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05,
        eos_token_ids=(7, 5),
    )  # fmt: skip


def test_ends_of_the_model_config(tmp_path: Path) -> None:
    """config.json names the end where there is no generation_config.json; nothing else is taken."""
    (tmp_path / "config.json").write_text('{"eos_token_id": 2, "temperature": 0.1}')
    assert load(tmp_path) == GenerationDefaults(eos_token_ids=(2,))
    (tmp_path / "generation_config.json").write_text("{}")
    assert load(tmp_path) == GenerationDefaults()


def test_gguf_sampling_keys(tmp_path: Path) -> None:
    """GGUF files may carry the same recommendations; a negative top_k is no limit."""

    def fill(writer) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_float32("general.sampling.top_p", 0.25)
        writer.add_int32("general.sampling.top_k", -1)

    path = write_gguf(tmp_path / "s.gguf", "llama", fill, {})
    assert load(path) == GenerationDefaults(temperature=0.5, top_p=0.25)
    bare = write_gguf(tmp_path / "bare.gguf", "llama", lambda writer: None, {})
    assert load(bare) == GenerationDefaults()


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", -0.5, "at least 0"),
        ("top_p", 0.0, "in (0, 1]"),
        ("top_p", 1.5, "in (0, 1]"),
        ("min_p", 1.1, "in [0, 1]"),
        ("repetition_penalty", 0.0, "[0.01, 10.0]"),
        ("repetition_penalty", 1e-38, "[0.01, 10.0]"),
        ("eos_token_id", -3, "at least 0"),
    ],
)
def test_nonsense_is_named(tmp_path: Path, field: str, value: float, limit: str) -> None:
    """A value out of range names file, field, limit and value."""
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(GenerationConfigError) as error:
        load(tmp_path)
    for word in ("generation_config.json", field, limit, str(value)):
        assert word in str(error.value)


@pytest.mark.parametrize("content", ["{", '{"temperature": "hot"}', '{"eos_token_id": [1.5]}'])
def test_unreadable_file(tmp_path: Path, content: str) -> None:
    """Broken JSON and wrong types are one clear line."""
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(GenerationConfigError, match=r"generation_config\.json cannot be used"):
        load(tmp_path)


def test_every_default_is_a_sampling_parameter() -> None:
    """The names are those of the request's parameters, so that nothing is read and not applied."""
    from cearx.core.messages import SamplingParams

    names = {field.name for field in msgspec.structs.fields(GenerationDefaults)}
    assert names <= {field.name for field in msgspec.structs.fields(SamplingParams)}
