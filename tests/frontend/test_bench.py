"""`cearx bench` against a server that counts words: exact lengths, honest failures, exact rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_openai import TEMPLATE_TOKENS, fake_openai

from cearx.frontend.bench.cli import main
from cearx.frontend.bench.matrix import OFFICIAL_POINTS, parse_points


def bench(*arguments: str, output: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and rows."""
    code = main([*arguments, "--num-clients", "2", "--output", str(output)])
    return code, json.loads(output.read_bytes())["runs"][0].get("points", [])


def test_the_matrix_has_thirty_points() -> None:
    """The official points, each once, in their order."""
    assert len(set(OFFICIAL_POINTS)) == 30
    assert str(OFFICIAL_POINTS[0]) == "C1/I32/O256"
    assert str(OFFICIAL_POINTS[-1]) == "C64/I256/O4096"
    assert not [p for p in OFFICIAL_POINTS if p.concurrency >= 16 and p.input_len == 4096]


@pytest.mark.parametrize("text", ["C1/I32", "C0/I32/O1", "all,C1/I1/O1", "", "C1/I32/O-1"])
def test_other_points_are_refused(text: str) -> None:
    """What is no point is an error that shows it."""
    with pytest.raises(ValueError, match="C1/I32/O256"):
        parse_points(text)


def test_a_matrix_is_exact(tmp_path: Path) -> None:
    """Prompts have the asked number of tokens, all differ, and the row adds up."""
    with fake_openai(double=frozenset(("water", "story"))) as server:
        arguments = ("matrix", "--base-url", server.url, "--points", "C5/I33/O7,C1/I300/O2")
        code, rows = bench(*arguments, output=tmp_path / "out.json")
    assert code == 0
    assert [(row["concurrency"], row["input_len"], row["output_len"]) for row in rows] == [
        (5, 33, 7),
        (1, 300, 2),
    ]
    first = rows[0]
    assert first["status"] == "ok"
    assert first["completed"] == 5
    assert first["total_input_tokens"] == 5 * 33
    assert first["total_output_tokens"] == 5 * 7
    assert first["output_throughput"] == pytest.approx(35 / first["duration"])
    assert first["total_token_throughput"] == pytest.approx((35 + 165) / first["duration"])
    burst = [request for request in server.requests if request["max_tokens"] == 7]
    texts = {request["messages"][0]["content"] for request in server.requests}
    assert len(texts) == len(server.requests) == 8  # five and one, and two warm-ups
    assert {server.count(request) for request in burst} == {33}
    assert all(request["ignore_eos"] for request in server.requests)
    assert not any(word in text.split() for word in server.double for text in texts)


def test_completions_send_token_ids(tmp_path: Path) -> None:
    """The completions route gets ids of the asked range."""
    with fake_openai() as server:
        code, rows = bench(
            *("matrix", "--base-url", server.url, "--points", "C3/I40/O4"),
            *("--endpoint", "completions", "--token-ids", "5:9", "--reverse", "--repeat", "2"),
            output=tmp_path / "out.json",
        )
    assert code == 0
    assert [row["repeat"] for row in rows] == [0, 1]
    assert {len(request["prompt"]) for request in server.requests} == {40}
    assert {token for request in server.requests for token in request["prompt"]} == {5, 6, 7, 8}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("short", "6 output tokens by the server's usage, 7 were asked for"),
        ("long-prompt", "34 prompt tokens by the server's usage, 33 were asked for"),
        ("no-usage", "no usage"),
        ("refuses", "HTTP status 503: too many requests wait: 9, limit 8"),
        ("breaks", "closed before the answer's end"),
        ("error-event", "the engine has died"),
        ("no-done", "without [DONE]"),
        ("no-http", "no HTTP"),
        ("silent", "no end within 0.3 s"),
    ],
)
def test_failures_are_shown(
    fault: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind of failure marks the point, is counted, printed and the exit code's reason."""
    with fake_openai(fault) as server:
        code, (row,) = bench(
            *("matrix", "--base-url", server.url, "--points", "C3/I33/O7"),
            *("--request-timeout", "0.3" if fault == "silent" else "30"),
            output=tmp_path / "out.json",
        )
    assert code == 1
    assert (row["status"], row["completed"], row["failed"]) == ("failed", 0, 3)
    (error,) = row["errors"]
    assert words in error
    assert row["errors"][error] == 3
    assert words in " ".join(capsys.readouterr().out.split())


def test_a_prompt_below_the_template_fails(tmp_path: Path) -> None:
    """A length that the chat template alone exceeds marks its point and no other."""
    with fake_openai() as server:
        points = f"C2/I{TEMPLATE_TOKENS}/O2,C2/I64/O2"
        code, rows = bench(
            *("matrix", "--base-url", server.url, "--points", points),
            output=tmp_path / "out.json",
        )
    assert code == 1
    assert [row["status"] for row in rows] == ["failed", "ok"]
    assert str(TEMPLATE_TOKENS + 1) in next(iter(rows[0]["errors"]))


def test_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a server the exit code is 2 and the words say where it was looked for."""
    assert main(["matrix", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err
