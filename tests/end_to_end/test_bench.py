"""`cearx bench` against the real server and model, whose template and tokenizer set lengths."""

import json
from pathlib import Path

import pytest
from server_process import Server

from cearx.core.model_source import resolve
from cearx.frontend.bench.cli import main

pytestmark = pytest.mark.model


@pytest.mark.parametrize("is_local", [False, True])
def test_lengths_are_exact(server: Server, is_local: bool, tmp_path: Path) -> None:
    """Prompts and outputs have the asked lengths, counted by the server or by the tokenizer."""
    output = tmp_path / "out.json"
    tokenizer = ("--tokenizer", str(resolve(None, lambda *_: None).path)) if is_local else ()
    arguments = ["matrix", "--base-url", server.url, "--points", "C3/I61/O5,C1/I200/O2"]
    code = main([*arguments, "--output", str(output), *tokenizer])
    rows = json.loads(output.read_bytes())["runs"][0]["points"]
    assert code == 0, rows
    assert [(row["total_input_tokens"], row["total_output_tokens"]) for row in rows] == [
        (3 * 61, 3 * 5),
        (200, 2),
    ]
    assert all(row["median_ttft_ms"] < row["median_e2el_ms"] for row in rows)


def test_rates_and_token_ids(server: Server, tmp_path: Path) -> None:
    """Completions take token ids, and a rate spreads the requests over time."""
    output = tmp_path / "out.json"
    arguments = ["serve", "--base-url", server.url, "--output", str(output)]
    arguments += ["--endpoint", "completions", "--num-prompts", "6", "--request-rate", "20"]
    arguments += ["--random-input-len", "30", "--random-output-len", "4", "--ignore-eos"]
    assert main(arguments) == 0
    (row,) = json.loads(output.read_bytes())["runs"][0]["points"]
    assert (row["completed"], row["total_input_tokens"], row["total_output_tokens"]) == (6, 180, 24)
