"""Finds a model's files from what the person called it, and fetches them where they are not here.

Owns the meaning of the MODEL argument: nothing or the default's name, a folder, a .gguf file, a hub
id. Never opens a tensor. Called once by the supervisor before any process starts; whatever goes
wrong is a ModelNotFound with one line for the person.
"""

import re
from pathlib import Path

from cearx.core.config import DEFAULT_MODEL, ModelFiles
from cearx.core.default_model import default_cache_dir, fetch_default_model
from cearx.core.model_error import ModelNotFound, OnProgress

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

__all__ = ["ModelNotFound", "OnProgress", "resolve"]


def resolve(name: str | None, on_progress: OnProgress, cache_dir: Path | None = None) -> ModelFiles:
    """The files of the model called `name`, on this machine's disk.

    on_progress(stage, completed, total) is called several times a second while something is
    fetched, from any thread; total is 0 when nobody knows it. `cache_dir` is where the default
    model is kept.
    """
    if name is None or name == DEFAULT_MODEL:
        path = fetch_default_model(cache_dir or default_cache_dir(), on_progress)
        return ModelFiles(path=path, name=DEFAULT_MODEL)
    if (local := _existing(name)) is not None:
        return ModelFiles(path=_check_local(local.absolute()), name=name)
    if name.startswith((".", "~", "/")) or name.endswith(".gguf"):
        raise ModelNotFound(f"there is no file or folder {name}")
    if not HUB_ID.fullmatch(name):
        raise ModelNotFound(
            f"there is no model {name!r}: give {DEFAULT_MODEL}, a folder, a .gguf file or a hub id "
            "such as Qwen/Qwen3-0.6B"
        )
    from cearx.core.hub_model import fetch_hub_model  # its library takes long to import

    return ModelFiles(path=fetch_hub_model(name, on_progress), name=name)


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except RuntimeError:  # the home folder of a user that does not exist
        return None
    except OSError as error:
        raise ModelNotFound(f"cannot look for {name[:80]}: {error.strerror}") from error


def _check_local(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{path} is not a model: give a folder or a .gguf file")
        return path
    if (path / "config.json").is_file():
        return path
    files = sorted(found.name for found in path.glob("*.gguf"))
    hint = f"; name one of its files: {', '.join(files[:5])}" if files else ""
    raise ModelNotFound(f"the folder {path} has no config.json{hint}")
