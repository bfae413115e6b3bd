"""The benchmark's arithmetic and its reading of streams, against numpy and against the clock."""

import asyncio
import random
import time
from pathlib import Path

import numpy as np
import pytest
from fake_openai import fake_openai

from cearx.frontend.bench.compare import geometric_mean, point_name
from cearx.frontend.bench.concurrency_gate import ConcurrencyGate
from cearx.frontend.bench.event_parser import EventParser
from cearx.frontend.bench.fleet import RunRecords, auto_num_clients
from cearx.frontend.bench.load_loop import LoadLoop
from cearx.frontend.bench.matrix import OFFICIAL_POINTS
from cearx.frontend.bench.metrics import Goodput, summarise
from cearx.frontend.bench.results import read_results
from cearx.frontend.bench.wire import (
    ClientLoad,
    Done,
    Load,
    PlannedRequest,
    StreamRecord,
    Target,
)

CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\n'


def random_records(seed: int, count: int) -> list[StreamRecord]:
    draw = random.Random(seed)
    records = []
    for index in range(count):
        gaps = [draw.expovariate(100) for _ in range(draw.randrange(0, 30))]
        ttft = draw.uniform(0.01, 0.5)
        records.append(
            StreamRecord(
                index=index,
                start_s=draw.uniform(0, 1),
                end_s=draw.uniform(1, 4),
                ttft_s=ttft,
                latency_s=ttft + sum(gaps),
                itls_s=gaps,
                prompt_tokens=draw.randrange(1, 99),
                completion_tokens=len(gaps) + draw.randrange(1, 5),
                error=draw.choice([None, None, None, "too bad"]),
            )
        )
    return records


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("seed", range(5))
def test_figures_are_those_of_numpy(seed: int, count: int) -> None:
    """Every figure of a row, from random records, computed a second time."""
    records = random_records(seed, count)
    figures = summarise(records)
    good = [record for record in records if record.error is None]
    assert (figures.completed, figures.failed) == (len(good), count - len(good))
    assert figures.duration == max(record.end_s for record in records)
    assert figures.total_output_tokens == sum(record.completion_tokens for record in good)
    assert figures.errors == ({"too bad": count - len(good)} if len(good) < count else {})
    assert figures.output_throughput * figures.duration == pytest.approx(
        sum(record.completion_tokens for record in good)
    )
    assert figures.request_throughput * figures.duration == pytest.approx(len(good))
    samples = {
        "ttft": [r.ttft_s for r in good],
        "tpot": [
            (r.latency_s - r.ttft_s) / (r.completion_tokens - 1)
            for r in good
            if r.completion_tokens > 1
        ],
        "itl": [gap for r in good for gap in r.itls_s],
        "e2el": [r.latency_s for r in good],
    }
    expected = {}
    for name, values in samples.items():
        if values:
            milliseconds = 1e3 * np.array(values)
            expected[f"mean_{name}_ms"] = np.mean(milliseconds)
            expected[f"median_{name}_ms"] = np.percentile(milliseconds, 50)
            expected[f"std_{name}_ms"] = np.sqrt(np.mean((milliseconds - milliseconds.mean()) ** 2))
            for percent in (90, 95, 99):
                expected[f"p{percent}_{name}_ms"] = np.percentile(milliseconds, percent)
            expected[f"max_{name}_ms"] = np.max(milliseconds)
    assert figures.latencies == pytest.approx(expected)


def test_goodput_counts_what_keeps_every_bound() -> None:
    """One slow first token, one slow stream and one failure leave one good request of four."""

    def record(ttft_s: float, latency_s: float, error: str | None = None) -> StreamRecord:
        return StreamRecord(
            0, 0.0, 2.0, ttft_s, latency_s, prompt_tokens=1, completion_tokens=11, error=error
        )

    records = [record(0.1, 0.2), record(0.3, 0.4), record(0.1, 1.0), record(0.1, 0.2, "no")]
    assert summarise(records).request_goodput is None
    assert summarise(records, Goodput(ttft=200, tpot=50)).request_goodput == pytest.approx(0.5)
    assert summarise(records, Goodput(e2el=300)).request_goodput == pytest.approx(0.5)
    assert summarise(records, Goodput(tpot=50)).request_goodput == pytest.approx(1.0)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_any_cut_of_a_stream_reads_alike(size: int, line_end: bytes) -> None:
    """Chunks with choices count, wherever the network cuts; comments and usage do not."""
    stream = CHUNK + b": keep-alive\n\n" + CHUNK + b"event: x\n" + CHUNK + USAGE
    stream += b"data: [DONE]\n\n"
    stream = stream.replace(b"\n", line_end)
    parser = EventParser()
    for start in range(0, len(stream), size):
        parser.feed(stream[start : start + size], float(start))
    assert len(parser.chunk_times) == 3
    assert (parser.prompt_tokens, parser.completion_tokens) == (5, 3)
    assert parser.is_done
    assert parser.error is None


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (b'data: {"error":{"message":"out of memory"}}\n\n', "out of memory"),
        (b'data: {"error":"gone"}\n\n', "gone"),
        (b"data: {broken\n\n", "no chunk of an answer"),
        (b'data: {"choices":7}\n\n', "no chunk of an answer"),
    ],
)
def test_errors_in_a_stream_are_kept(event: bytes, words: str) -> None:
    """An error event, or an event that is no chunk, is the stream's error."""
    parser = EventParser()
    parser.feed(CHUNK + event + b"data: [DONE]\n\n", 1.0)
    assert parser.error is not None
    assert words in parser.error


def run_load(url: str, body: bytes, on_progress=lambda ended, chunks: None) -> Done:
    """One request by a load loop in this process."""
    port = int(url.rsplit(":", 1)[1])
    target = Target(
        host="127.0.0.1",
        address="127.0.0.1",
        port=port,
        is_tls=False,
        path="/v1/chat/completions",
        headers={},
        request_timeout_s=30,
    )
    load = Load(target=target, requests=[PlannedRequest(0, 0.0, body)], is_gated=False)
    return asyncio.run(LoadLoop(load, ConcurrencyGate(0, 0), on_progress).run(time.monotonic()))


def chat_body(tokens: int) -> bytes:
    return b'{"messages":[{"role":"user","content":"a b"}],"stream":true,"max_tokens":%d}' % tokens


def test_times_are_those_of_the_chunks() -> None:
    """TTFT is the first chunk's, ITL the gaps, whatever number of tokens a chunk has."""
    with fake_openai(step_s=0.05, per_chunk=2) as server:
        (record,) = run_load(server.url, chat_body(8)).records
    assert record.error is None
    assert record.ttft_s is not None
    assert record.latency_s is not None
    assert record.ttft_s >= 0.05
    assert len(record.itls_s) == 3
    assert sum(record.itls_s) >= 0.1  # three steps; a late first read shortens the first gap
    assert record.latency_s == pytest.approx(record.ttft_s + sum(record.itls_s))
    tpot_ms = summarise([record]).latencies["median_tpot_ms"]
    assert tpot_ms == pytest.approx(1e3 * sum(record.itls_s) / 7)


def test_a_slow_client_is_detected() -> None:
    """A client whose event loop is held up says so."""
    with fake_openai(step_s=0.02) as server:
        done = run_load(server.url, chat_body(40), lambda ended, chunks: time.sleep(0.1))
    assert done.load.lag_max_ms > 50
    assert "late" in " ".join(RunRecords(records=[], clients=[done.load]).limits)


def test_limits_of_clients() -> None:
    """Above 80 % of a core or 5 ms of lag the client is named, below it is not."""

    def limits(busy: float, lag_ms: float) -> list[str]:
        load = ClientLoad(
            busy_share=busy, lag_p99_ms=lag_ms, lag_max_ms=99, num_chunks=1, late_ms=0
        )
        return RunRecords(records=[], clients=[load]).limits

    assert limits(0.79, 4.9) == []
    assert limits(0.81, 0) == ["client 0 was 81% busy"]
    assert limits(0, 5.1) == ["client 0's event loop was 5.1 ms late"]


def test_the_number_of_clients() -> None:
    """A process for 16 streams, on a fourth of the cores at most, and always one."""
    assert [auto_num_clients(n, 16) for n in (1, 16, 17, 64, 256)] == [1, 1, 2, 4, 4]
    assert auto_num_clients(256, 2) == 1
    assert auto_num_clients(256, 128) == 16


def test_results_of_both_peers_are_complete() -> None:
    """The checked-in figures of other engines: thirty points each, with their source."""
    path = Path(__file__).parents[2] / "docs" / "results" / "peers_h200.json"
    means = {}
    for run in read_results(path):
        assert run.hardware == "one NVIDIA H200"
        assert "exact prompt and output lengths" in (run.method or "")
        if run.model == "Qwen3-8B":
            assert [point_name(row) for row in run.points] == list(map(str, OFFICIAL_POINTS))
            means[run.engine] = geometric_mean([row["output_throughput"] for row in run.points])
    assert means == pytest.approx({"vLLM 0.26.0": 948.8, "SGLang 0.5.16": 941.8}, abs=0.1)
