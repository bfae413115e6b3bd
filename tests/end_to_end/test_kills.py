"""A process is killed while streams run and grammars compile: who hears what, and what is left."""

import json
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from degenerate import DEGENERATE
from frontend_process import write_model
from server_process import Server, serving
from tiny_models import save_tiny, tiny_model

STREAMS = 4
GRAMMARS = ("reference_chain", "repetitions", "alternatives", "large_multiple")


class Clients:
    """Their threads and what each one saw: a status and the end of the text, or the exception."""

    def __init__(self, server: Server) -> None:
        self._url = server.url + "/v1/completions"
        self.ends: list[tuple[int, str] | httpx.TransportError] = []
        self.has_begun = threading.Semaphore(0)
        bodies: list[dict[str, Any]] = [
            {"max_tokens": 900, "ignore_eos": True, "stream": True} for _ in range(STREAMS)
        ]
        bodies += [{"max_tokens": 4, **DEGENERATE[name](1)} for name in GRAMMARS]
        self._threads = [threading.Thread(target=self._ask, args=(body,)) for body in bodies]
        for thread in self._threads:
            thread.start()

    def _ask(self, body: dict[str, Any]) -> None:
        text = ""
        body |= {"model": "m", "prompt": "a"}
        try:
            with httpx.stream("POST", self._url, json=body, timeout=60) as answer:
                for piece in answer.iter_text():
                    text += piece
                    self.has_begun.release()
            self.ends.append((answer.status_code, text))
        except httpx.TransportError as error:
            self.ends.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"


def check_end(status: int, text: str) -> None:
    """Whatever was answered is whole, or says in an error object what has happened."""
    if text.startswith("data: "):
        events = [line for line in text.split("\n\n") if line]
        assert events[-1] == "data: [DONE]"
        last = json.loads(events[-2].removeprefix("data: "))
    else:
        last = json.loads(text)
    if "error" not in last:
        assert status == 200
        return
    codes = {"engine_lost", "shutting_down", "invalid_value", "request_failed"}
    assert last["error"]["code"] in codes, last


@pytest.mark.parametrize("module", ["cearx.core", "cearx.worker", "cearx.frontend"])
def test_a_killed_process_amid_work(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, one line that names it; no client hangs, nothing stays behind."""
    short = tempfile.mkdtemp(prefix="kill")  # paths of sockets must not be long
    monkeypatch.setenv("TMPDIR", short)
    save_tiny(tiny_model("llama", vocab_size=258), tmp_path)
    write_model(tmp_path)
    flags = ("--served-model-name", "m", "--max-model-len", "1024", "--frontends", "2")
    with serving(str(tmp_path), *flags) as server:
        clients = Clients(server)
        for _ in range(STREAMS):
            clients.has_begun.acquire()
        family = server.family()
        assert len(list(Path(short).glob("cearx-*"))) == 1
        server.child(module).kill()
        assert server.wait_end() == 1
        clients.join()
        assert not psutil.wait_procs(family, 5)[1]
        assert not list(Path(short).glob("cearx-*"))
    shutil.rmtree(short)
    text = "".join(server.stderr)
    (message,) = [line for line in server.stderr if "was killed by SIGKILL" in line]
    assert module.removeprefix("cearx.") in message
    assert "Traceback" not in text and "Exception in" not in text, text
    for end in clients.ends:
        if isinstance(end, httpx.TransportError):
            assert module == "cearx.frontend", end  # its own connections broke
        else:
            check_end(*end)
