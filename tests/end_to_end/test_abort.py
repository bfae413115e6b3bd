"""Requests are taken back by their ids, whichever frontend they run in and whichever is asked."""

import threading
from pathlib import Path

import httpx
from frontend_process import write_model
from server_process import serving
from tiny_models import save_tiny, tiny_model

CLIENTS = 12


def test_aborting_across_frontends(tmp_path: Path) -> None:
    """Every second stream is aborted, running or in the queue; it says so. The others are whole."""
    save_tiny(tiny_model("llama", vocab_size=258), tmp_path)
    write_model(tmp_path)
    texts: dict[int, str] = {}
    begun = threading.Barrier(CLIENTS + 1)

    def stream(number: int) -> None:
        body = {"model": "m", "prompt": "a", "max_tokens": 800, "ignore_eos": True, "stream": True}
        headers = {"x-request-id": f"job-{number}"}
        begun.wait(60)
        url = server.url + "/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer:
            texts[number] = answer.read().decode()

    flags = ("--served-model-name", "m", "--max-model-len", "1024", "--max-num-seqs", "2")
    with serving(str(tmp_path), *flags, "--frontends", "3") as server:
        threads = [threading.Thread(target=stream, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        begun.wait(60)
        while httpx.get(server.url + "/load").json()["server_load"] < CLIENTS:
            pass  # with 2 at a time nobody has come far
        aborted = [number for number in range(CLIENTS) if number % 2]
        for number in aborted:  # a connection each: any frontend may be asked
            ids = [f"job-{number}", "nobody"]
            answer = httpx.post(server.url + "/abort_requests", json={"request_ids": ids})
            assert answer.status_code == 200
        for thread in threads:
            thread.join(120)
        assert httpx.get(server.url + "/load").json()["server_load"] == 0
        assert server.stop() == 0
    for number in range(CLIENTS):
        text = texts[number]
        if text.startswith("data: "):
            *_, last, done = text.split("\n\n")[:-1]
            assert done == "data: [DONE]"
        else:
            last = text  # nothing had been sent
        word = '"code":"request_aborted"' if number in aborted else '"finish_reason":"length"'
        assert word in last, (number, last)
