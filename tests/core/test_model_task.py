"""What a model is served for, from its files; and pooling that is refused by name."""

import json
from pathlib import Path

import pytest

from cearx.core.config import ModelFiles, Task
from cearx.core.model_error import ModelNotFound
from cearx.core.model_task import label_words, with_task

CONFIG = {"architectures": ["Qwen3ForCausalLM"]}
MODULE = "sentence_transformers.models."
EMBEDDING = [
    {"idx": 0, "name": "0", "path": "", "type": MODULE + "Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": MODULE + "Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": MODULE + "Normalize"},
]
LAST_TOKEN = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}


def write(folder: Path, **contents: object) -> Path:
    """A model folder; a name's double underscore is a slash."""
    for name, content in {"config": CONFIG, **contents}.items():
        path = folder / (name.replace("__", "/") + ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def task(path: Path, name: str = "some/model", wanted: Task | None = None) -> Task:
    return with_task(ModelFiles(path=path, name=name), wanted).task


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-0.6B", "generate"),
        ("Qwen/Qwen3-Reranker-0.6B", "score"),
        ("models/Qwen3-Embedding-4B-Q8_0.gguf", "embed"),
        ("rerankers/llama", "generate"),
    ],
)
def test_by_name(tmp_path: Path, name: str, expected: str) -> None:
    """Where the files do not tell them apart, the last part of the name does."""
    assert task(write(tmp_path), name) == expected


def test_by_files(tmp_path: Path) -> None:
    """Files go before the name, and what the person says before both."""
    embed = write(tmp_path / "a", modules=EMBEDDING, **{"1_Pooling__config": LAST_TOKEN})
    assert task(embed, "x/reranker") == "embed"
    score = write(tmp_path / "b", config={**CONFIG, "classifier_from_token": ["nein", "ja"]})
    assert task(score) == "score"
    assert task(score, wanted="generate") == "generate"
    assert (label_words(score), label_words(embed)) == (("nein", "ja"), ("no", "yes"))


@pytest.mark.parametrize("wanted", [None, "embed"])
def test_other_pooling_is_refused(tmp_path: Path, wanted: Task | None) -> None:
    """A mean over tokens, or a layer behind the pooling, is named and never approximated."""
    mean = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    with pytest.raises(ModelNotFound, match="pooling_mode_mean_tokens"):
        task(write(tmp_path / "a", modules=EMBEDDING, **{"1_Pooling__config": mean}), wanted=wanted)
    dense = [*EMBEDDING, {"path": "3_Dense", "type": MODULE + "Dense"}]
    with pytest.raises(ModelNotFound, match="Dense"):
        task(write(tmp_path / "b", modules=dense), wanted=wanted)


def test_damaged_files_are_one_clear_line(tmp_path: Path) -> None:
    """The message names the file."""
    write(tmp_path, modules={"no": "list"})
    with pytest.raises(ModelNotFound, match=r"modules\.json"):
        task(tmp_path)
    write(tmp_path, modules=[], config={"classifier_from_token": ["one"]})
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        task(tmp_path)
