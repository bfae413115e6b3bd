"""Constrained answers and scored prompts of the default model, through all processes."""

import json
from pathlib import Path

import httpx
import jsonschema
import pytest
import torch
from loglikelihoods import read_answer, reference_scores, request_body, task_items
from server_process import Server
from transformers import AutoModelForCausalLM

from cearx.core.model_source import resolve
from cearx.frontend.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 40_000_000},
    },
    "required": ["city", "population"],
    "additionalProperties": False,
}


def test_choices_follow_a_schema_whole_and_streamed(server: Server) -> None:
    """Three choices validate, and the joined stream is the body."""
    body = {
        "model": server.name,
        "messages": [{"role": "user", "content": "Name a city as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}},
        "n": 3,
        "seed": 5,
        "max_tokens": 120,
        "temperature": 1,
    }
    whole = server.post("/v1/chat/completions", **body).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop"] * 3
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    streamed = ["", "", ""]
    answer = httpx.post(
        server.url + "/v1/chat/completions", json=body | {"stream": True}, timeout=120
    )
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


def test_log_likelihoods_are_those_of_transformers(server: Server) -> None:
    """Ten items as lm-eval asks for them: sums within 1e-3, the same greedy flags."""
    files = resolve(None, lambda *_: None)
    items = task_items(load_tokenizer(files).encode, 10)
    found = read_answer(server.post("/v1/completions", **request_body(items)).json(), items)
    model = AutoModelForCausalLM.from_pretrained(
        str(Path(files.path).parent), gguf_file=files.path.name, dtype=torch.float32
    )
    for score, expected in zip(found, reference_scores(model.eval(), items), strict=True):
        assert score.logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert score.is_greedy == expected.is_greedy
