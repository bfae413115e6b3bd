"""A run: its requests with the lengths they must have, and the row that becomes of it.

Owns the check of exact lengths: a stream whose usage says otherwise is a failure, whatever it
measured. Called by `matrix.py` and `serve.py`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from cearx.frontend.bench.fleet import Fleet, OnProgress, RunRecords
from cearx.frontend.bench.metrics import Figures, Goodput, summarise
from cearx.frontend.bench.wire import PlannedRequest, StreamRecord, Target


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    body: bytes
    start_s: float = 0.0
    input_len: int | None = None
    """Tokens that the prompt must have by the server's usage; None is not checked."""
    output_len: int | None = None
    """Likewise for the output."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    figures: Figures
    run: RunRecords

    @property
    def is_ok(self) -> bool:
        return self.figures.failed == 0 and self.figures.completed > 0


def length_error(request: RunRequest, record: StreamRecord) -> str | None:
    """What is wrong with a stream's lengths."""
    for what, wanted, counted in (
        ("prompt", request.input_len, record.prompt_tokens),
        ("output", request.output_len, record.completion_tokens),
    ):
        if wanted is not None and counted is None:
            return "the stream holds no usage, so its lengths are unknown"
        if wanted is not None and counted != wanted:
            return f"{counted} {what} tokens by the server's usage, {wanted} were asked for"
    return None


async def execute(
    fleet: Fleet,
    target: Target,
    requests: Sequence[RunRequest],
    *,
    max_concurrency: int | None = None,
    goodput: Goodput | None = None,
    on_progress: OnProgress = lambda num_ended, num_chunks: None,
) -> Outcome:
    """Sends the requests and sums up; raises BenchError only when the clients themselves fail."""
    planned = [
        PlannedRequest(index, request.start_s, request.body)
        for index, request in enumerate(requests)
    ]
    run = await fleet.run(target, planned, max_concurrency=max_concurrency, on_progress=on_progress)
    for request, record in zip(requests, run.records, strict=True):
        record.error = record.error or length_error(request, record)
    return Outcome(figures=summarise(run.records, goodput), run=run)


def row(outcome: Outcome, **settings: Any) -> dict[str, Any]:
    """One row of a result file: the run's settings, its figures, its clients' load."""
    figures = msgspec.to_builtins(outcome.figures)
    latencies = figures.pop("latencies")
    if figures["request_goodput"] is None:
        del figures["request_goodput"]
    clients = outcome.run.clients
    return {
        **settings,
        "status": "ok" if outcome.is_ok else "failed",
        **figures,
        **latencies,
        "num_clients": len(clients),
        "max_client_busy_share": max(client.busy_share for client in clients),
        "max_client_lag_p99_ms": max(client.lag_p99_ms for client in clients),
        "client_limits": outcome.run.limits,
    }


def details(records: Sequence[StreamRecord]) -> dict[str, Any]:
    """A run's streams one by one, for --save-detailed: lists in the order of the requests."""
    return {
        "start_times": [record.start_s for record in records],
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.completion_tokens for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.itls_s for record in records],
        "e2els": [record.latency_s for record in records],
        "request_errors": [record.error for record in records],
    }
