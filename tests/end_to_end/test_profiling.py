"""Profiles and step times of a whole server."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

from make_dummy_model import MODELS, make_dummy_model
from server_process import replay, serving


def small_model(folder: Path) -> Path:
    """Random weights of a small Qwen3."""
    config = folder / "config.json"
    shape = json.loads((MODELS / "qwen3_0.6b" / "config.json").read_text())
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 200}
    config.write_text(json.dumps(shape | small))
    return make_dummy_model(config, folder / "model")


def test_profiles_by_the_api_and_times_in_the_log(tmp_path: Path) -> None:
    """Started and stopped over HTTP; the log's notes show every hop of the first tokens."""
    traces = tmp_path / "traces"
    flags = ("--device", "cpu", "--load-format", "dummy", "--max-model-len", "512")
    model = str(small_model(tmp_path))
    with serving(model, *flags, "--profiler-dir", str(traces), trace=tmp_path / "trace") as server:
        asked = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True}
        assert server.post("/stop_profile").status_code == 400
        assert server.post("/start_profile").json() == {"status": "started"}
        again = server.post("/start_profile")
        assert again.status_code == 400
        assert "recorded already" in again.json()["error"]["message"]
        assert server.post("/v1/completions", **asked).status_code == 200
        path = Path(server.post("/stop_profile").raise_for_status().json()["path"])
        for _ in range(3):
            assert server.post("/v1/completions", **asked).status_code == 200
        with gzip.open(path) as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert "step 0: 0 decodes, 3 prefill tokens" in names
        assert any(name.startswith("aten::") for name in names)
        assert server.stop() == 0
    assert list(traces.iterdir()) == [path]
    assert replay(server.trace_log).returncode == 0
    command = [sys.executable, "-P", "-m", "cearx.core.cli", "replay", "stats"]
    done = subprocess.run(
        [*command, str(tmp_path / "trace"), "--json"], capture_output=True, check=True
    )
    run = json.loads(done.stdout)["run"]
    for name in ("plan it", "write the log", "to the worker", "model, device clock"):
        assert run["step_parts"][name]["count"] > 20, name
        assert 0 < run["step_parts"][name]["p50"] <= run["step_parts"][name]["p99"], name
    hops = run["first_token_parts"]
    assert {spread["count"] for spread in hops.values()} == {4}
    assert hops["model and transfer"]["p50"] > 0
    assert hops["result to delivered"]["p50"] > 0
    # The hops are the time to first token and what comes behind it, from the model to the client.
    total = sum(spread["mean"] for spread in hops.values())
    assert total >= run["ttft_us"]["mean"] - len(hops)
