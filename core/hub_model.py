"""Gets a model from the Hugging Face hub, or from that library's cache when it is there already.

Owns which files of a repository are wanted and the wording of what can go wrong; the transfer, its
cache and its resumption are `huggingface_hub`. Called by `model_source.py`.
"""

import io
import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from cearx.core.model_error import ModelNotFound, OnProgress, storage_error

WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
UNWANTED = ["[!1]*/*", "1*/*.safetensors", "consolidated*.safetensors"]
"""Sub-folders hold other formats, but 1_Pooling says how an embedding model pools; consolidated
files hold the same weights again."""
INDEX = "model.safetensors.index.json"


def fetch_hub_model(name: str, on_progress: OnProgress) -> Path:
    """The snapshot folder of the hub id `name`; raises ModelNotFound.

    A complete snapshot in the cache is taken without asking the hub, so that a machine without a
    network serves what it has.
    """
    on_progress(f"looking for {name}", 0, 0)
    folder = _cached(name)
    if folder is not None and not missing_files(folder):
        return folder
    folder = _download(name, on_progress)
    if missing := missing_files(folder):
        raise ModelNotFound(f"{name} on the hub cannot be served: it has no {missing[0]}")
    return folder


def missing_files(folder: Path) -> list[str]:
    """What a snapshot lacks of the files that serving needs."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    index = folder / INDEX
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            return [*missing, f"readable {INDEX}"]
        missing += [shard for shard in shards if not (folder / shard).is_file()]
    elif not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return missing


def _cached(name: str) -> Path | None:
    try:
        folder = snapshot_download(
            name, local_files_only=True, allow_patterns=WANTED, ignore_patterns=UNWANTED
        )
    except LocalEntryNotFoundError:  # nothing there, or not all of it
        return None
    except HFValidationError as error:
        raise ModelNotFound(f"{name!r} is not a hub id: {_first_line(error)}") from error
    return Path(folder)


def _download(name: str, on_progress: OnProgress) -> Path:
    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
                tqdm_class=_reporting_bar(name, on_progress),
            )
        )
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{name} is gated: accept its conditions on the hub and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(f"the hub has no model {name}, or it is private") from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{name} is not on this machine and the hub cannot be reached: {_first_line(error)}"
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise storage_error(error, name) from error
        raise ModelNotFound(f"{name} could not be fetched: {_first_line(error)}") from error
    except Exception as error:  # its HTTP library's errors are not part of its interface
        raise ModelNotFound(f"{name} could not be fetched: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _reporting_bar(name: str, on_progress: OnProgress) -> type[tqdm]:
    """A progress bar class that draws nothing and reports the bytes of all files together."""

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= {"disable": False, "file": io.StringIO()}  # a disabled bar does not count
            # Of two bars of bytes, what was received and what was stored, the latter is shown.
            received = str(kwargs.get("name")).endswith(".transfer")
            self.shows = kwargs.get("unit") == "B" and not received
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self.shows:
                on_progress(f"downloading {name}", int(self.n), int(self.total or 0))
            return drawn

    return ReportingBar
