"""What a model is served for, read from its files where nobody says it.

Owns the rules of `--task auto`: what an embedding model's own files say, the two tokens of a
reranker, the model's name. Opens configuration only, no tensor. Called by the supervisor and, for
the tokens, by the frontend.
"""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cearx.core.config import ModelFiles, Task
from cearx.core.model_error import ModelNotFound

MODULES = "modules.json"
"""What sentence-transformers runs one behind the other; embedding models have it."""
PLAIN_MODULES = ("Transformer", "Pooling", "Normalize")
LAST_TOKEN = "pooling_mode_lasttoken"
LABELS = ("no", "yes")
"""Qwen3-Reranker's."""

T = TypeVar("T")


class _Module(msgspec.Struct, kw_only=True):
    type: str
    path: str = ""


class _Labels(msgspec.Struct):
    classifier_from_token: tuple[str, str] | None = None


def with_task(files: ModelFiles, wanted: Task | None) -> ModelFiles:
    """The files with what they are served for; None: what suits them.

    Raises ModelNotFound for an embedding model that does more than to take the last token's state.
    """
    modules = _modules(files.path)
    task = wanted or _find_task(files, has_pooling=any(_kind(m) == "Pooling" for m in modules))
    if task == "embed":
        _check_modules(files, modules)
    return msgspec.structs.replace(files, task=task)


def label_words(path: Path) -> tuple[str, str]:
    """The tokens that say no and yes behind a pair of texts; raises ModelNotFound."""
    if not path.is_dir():
        return LABELS
    config = path / "config.json"
    return _read(config, _Labels).classifier_from_token or LABELS


def _find_task(files: ModelFiles, *, has_pooling: bool) -> Task:
    if has_pooling:
        return "embed"
    if files.path.is_dir() and _read(files.path / "config.json", _Labels).classifier_from_token:
        return "score"
    # The configuration of Qwen3-Reranker is, field by field, that of a model that writes texts.
    name = Path(files.name).name.lower()
    if "rerank" in name:
        return "score"
    return "embed" if "embedding" in name else "generate"


def _modules(path: Path) -> list[_Module]:
    if not (path / MODULES).is_file():
        return []
    return _read(path / MODULES, list[_Module])


def _kind(module: _Module) -> str:
    return module.type.rpartition(".")[2]


def _check_modules(files: ModelFiles, modules: list[_Module]) -> None:
    for module in modules:
        if _kind(module) not in PLAIN_MODULES:
            raise ModelNotFound(
                f"{files.name} needs a module {_kind(module)}, which is not supported;"
                f" supported: {', '.join(PLAIN_MODULES)}"
            )
        config = files.path / module.path / "config.json"
        if _kind(module) != "Pooling" or not config.is_file():
            continue
        modes = [m for m, is_on in _read(config, dict[str, Any]).items() if is_on is True]
        others = [m for m in modes if m.startswith("pooling_mode_") and m != LAST_TOKEN]
        if others:
            raise ModelNotFound(
                f"{files.name} pools by {', '.join(others)}, which is not supported;"
                f" supported: {LAST_TOKEN}"
            )


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelNotFound(f"{path} cannot be used: {error}") from error
