"""The whole server with weights rounded at load."""

import json
from pathlib import Path

from make_dummy_model import MODELS, make_dummy_model
from server_process import replay, serving


def test_a_server_with_int8_weights_answers(tmp_path: Path) -> None:
    """Random weights of a small Qwen3: one text per seed, the log says what is held as what."""
    config = tmp_path / "config.json"
    shape = json.loads((MODELS / "qwen3_0.6b" / "config.json").read_text())
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 200}
    config.write_text(json.dumps(shape | small | {"tie_word_embeddings": False}))
    folder = make_dummy_model(config, tmp_path / "model")
    flags = ("--load-format", "dummy", "--quantization", "int8", "--max-model-len", "512")
    with serving(str(folder), "--device", "cpu", *flags, trace=tmp_path / "trace") as server:
        texts = []
        for _ in range(2):
            reply = server.post("/v1/completions", prompt=[5, 6, 7], max_tokens=8, ignore_eos=True)
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"]["completion_tokens"] == 8
            reply = server.post("/v1/completions", prompt=[5, 6, 7], max_tokens=8, temperature=0)
            texts.append(reply.json()["choices"][0]["text"])
        assert texts[0] == texts[1] != ""
        assert "as 8-bit blocks" in "".join(server.stderr)
        assert server.stop() == 0
        assert replay(server.trace_log).returncode == 0
