"""`cearx bench serve`: arrivals, lengths, files, and the bound of requests in flight."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fake_openai import fake_openai
from small_tokenizers import byte_level_folder

from cearx.frontend.bench.arrivals import arrival_times
from cearx.frontend.bench.bench_error import BenchError
from cearx.frontend.bench.cli import main
from cearx.frontend.bench.dataset import DatasetPrompt, read_dataset, sample
from cearx.frontend.bench.local_count import local_counter


def serve(url: str, output: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and rows."""
    code = main(["serve", "--base-url", url, "--output", str(output), *arguments])
    return code, json.loads(output.read_bytes())["runs"][0].get("points", [])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    """Mean 1 / rate, variance 1 / (rate^2 burstiness), sorted, the same for the same seed."""
    times = arrival_times(20_000, 8.0, burstiness, seed=3)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.var() == pytest.approx(1 / (64 * burstiness), rel=0.15)
    assert times == arrival_times(20_000, 8.0, burstiness, seed=3)
    assert times != arrival_times(20_000, 8.0, burstiness, seed=4)


def test_an_infinite_rate_is_a_burst() -> None:
    """All at once."""
    assert arrival_times(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]


def test_requests_in_flight_are_bounded(tmp_path: Path) -> None:
    """The bound holds over all client processes together and is reached."""
    with fake_openai(step_s=0.02) as server:
        code, (row,) = serve(
            *(server.url, tmp_path / "out.json", "--num-clients", "3", "--num-prompts", "15"),
            *("--max-concurrency", "4", "--random-input-len", "50", "--random-output-len", "5"),
        )
    assert code == 0
    assert (row["completed"], row["num_clients"], row["request_rate"]) == (15, 3, "inf")
    assert server.max_running == 4


def test_clients_end_with_a_killed_benchmark(tmp_path: Path) -> None:
    """SIGKILL amid a run, of streams in which nothing comes any more, leaves no client process."""
    with fake_openai(step_s=0.05) as server:
        command = [sys.executable, "-P", "-m", main.__module__]
        command += ["serve", "--base-url", server.url, "--output", str(tmp_path / "out.json")]
        command += ["--num-clients", "2", "--num-prompts", "4"]
        command += ["--random-input-len", "50", "--random-output-len", "20"]
        bench = subprocess.Popen(command)
        try:
            give_up = time.monotonic() + 30
            while server.max_running < 4 and bench.poll() is None and time.monotonic() < give_up:
                time.sleep(0.02)
            server.step_s = 60  # the warm-up is over
            clients = psutil.Process(bench.pid).children()
        finally:
            bench.kill()
            bench.wait()
        assert (len(clients), server.max_running) == (2, 4)
        gone, alive = psutil.wait_procs(clients, 2)
        for client in alive:
            client.kill()
        assert len(gone) == 2


def test_lengths_prefixes_and_rates(tmp_path: Path) -> None:
    """Lengths are in their range and checked, prompts share a prefix, each rate has its row."""
    with fake_openai() as server:
        code, rows = serve(
            *(server.url, tmp_path / "out.json", "--num-prompts", "20", "--request-rate", "80,inf"),
            *("--random-input-len", "40", "--random-output-len", "10"),
            *("--random-range-ratio", "0.5", "--random-prefix-len", "30", "--ignore-eos"),
            *("--goodput", "ttft:60000", "--save-detailed", "--temperature", "0.5"),
            *("--seed", "7", "--api-key", "s3cret"),
        )
    assert code == 0
    assert [row["request_rate"] for row in rows] == [80.0, "inf"]
    for row in rows:
        assert all(50 <= length <= 90 for length in row["input_lens"])
        assert all(5 <= length <= 15 for length in row["output_lens"])
        assert len(set(row["input_lens"])) > 5
        assert row["request_goodput"] == pytest.approx(row["request_throughput"])
        assert len(row["ttfts"]) == len(row["itls"]) == len(row["e2els"]) == 20
    assert rows[0]["duration"] > 0.1
    assert max(rows[0]["start_times"]) > 0.1
    texts = [request["messages"][0]["content"].split() for request in server.requests]
    shared = 30 - 9  # the template and the first word are in the prefix
    assert len({tuple(words[: 1 + shared]) for words in texts}) == 1
    assert len({tuple(words[: 2 + shared]) for words in texts}) > 5
    assert all(request["temperature"] == 0.5 for request in server.requests)
    assert all("Authorization: Bearer s3cret" in head for head in server.headers[-20:])


def test_a_file_of_prompts(tmp_path: Path) -> None:
    """Prompts and lengths come from the file; each prompt is used before any comes twice."""
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"tell me {n}", "output_len": n + 1} for n in range(6)]
    file.write_text("\n".join(map(json.dumps, lines)))
    with fake_openai() as server:
        code, (row,) = serve(
            *(server.url, tmp_path / "out.json", "--dataset-path", str(file)),
            *("--num-prompts", "6", "--ignore-eos"),
        )
    assert code == 0
    assert row["total_output_tokens"] == sum(range(1, 7))
    sent = {
        (request["messages"][0]["content"], request["max_tokens"])
        for request in server.requests[-6:]
    }
    assert sent == {(line["prompt"], line["output_len"]) for line in lines}


def test_conversations_need_a_length(tmp_path: Path) -> None:
    """ShareGPT files have no lengths: the tokenizer counts the answer, or a flag says it."""
    folder = byte_level_folder(tmp_path)
    count = local_counter(folder, "completions")
    file = tmp_path / "share.json"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "return the config"}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    expected = count("return the config")
    assert read_dataset(file, None, count) == [DatasetPrompt(text="hello", output_len=expected)]
    assert read_dataset(file, 9, None) == [DatasetPrompt(text="hello", output_len=9)]
    with pytest.raises(BenchError, match="--tokenizer or --output-len"):
        read_dataset(file, None, None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "hi"}', "line 1 has no output_len"),
        ('{"prompt": 5}', "Expected `str`"),
        ("", "no prompt"),
        ("[]", "no prompt"),
        ('[{"conversations": []}]', "no prompt"),
    ],
)
def test_bad_files_are_refused(content: str, words: str, tmp_path: Path) -> None:
    """What is no data set names the file and the reason."""
    file = tmp_path / "bad"
    file.write_text(content)
    with pytest.raises(BenchError, match=words):
        read_dataset(file, None, len)


def test_samples_use_every_prompt() -> None:
    """More requests than prompts: every prompt as often as any other, give or take one."""
    prompts = [DatasetPrompt(text=str(n), output_len=1) for n in range(4)]
    drawn = [prompt.text for prompt in sample(prompts, 10, seed=1)]
    assert sorted(drawn.count(str(n)) for n in range(4)) == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--num-prompts", "0"), "--num-prompts must be at least 1, got 0"),
        (("--burstiness", "0"), "--burstiness must be above 0"),
        (("--random-range-ratio", "1"), "must be in [0, 1), got 1.0"),
        (("--goodput", "itl:3"), "got 'itl:3'"),
        (("--goodput", "ttft:-3"), "above 0 ms, got -3"),
        (("--dataset-path", "/no/such"), "cannot read /no/such"),
        (("--tokenizer", "/no/such"), "--tokenizer: no such folder or file: /no/such"),
    ],
)
def test_values_out_of_range(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is refused with the value and the limit, before anything is sent."""
    with fake_openai() as server:
        assert main(["serve", "--base-url", server.url, *arguments]) == 2
    assert words in capsys.readouterr().err
    assert server.requests == []
