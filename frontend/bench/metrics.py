"""From records of streams to one row of figures, under the names of `vllm bench serve`.

Owns the arithmetic: TTFT is to the first chunk with choices, ITL between such chunks, TPOT is
(latency - TTFT) / (tokens - 1), E2EL is the latency; percentiles interpolate linearly. Failed
requests count as failed and give no figure. Pure; called by `matrix.py` and `serve.py`.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from cearx.frontend.bench.wire import StreamRecord

PERCENTILES = (90, 95, 99)


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds in milliseconds that a good request keeps; None is no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None


class Figures(msgspec.Struct, kw_only=True):
    """A row: seconds, tokens, requests or tokens a second, milliseconds where the name says so."""

    duration: float
    """From the run's begin to the end of its last stream."""
    completed: int
    failed: int
    errors: dict[str, int]
    """How often each error came."""
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None = None
    latencies: dict[str, float]
    """`mean_ttft_ms`, `median_ttft_ms`, `std_ttft_ms`, ...; empty without streams."""


def tpot_s(record: StreamRecord) -> float | None:
    """Seconds a token after the first; None for a single token."""
    tokens = record.completion_tokens
    if tokens is None or tokens < 2 or record.latency_s is None or record.ttft_s is None:
        return None
    return (record.latency_s - record.ttft_s) / (tokens - 1)


def is_good(record: StreamRecord, goodput: Goodput) -> bool:
    """Whether every bound is kept; a request without a TPOT keeps that one."""
    measured = {"ttft": record.ttft_s, "tpot": tpot_s(record), "e2el": record.latency_s}
    for name, seconds in measured.items():
        limit_ms = getattr(goodput, name)
        if limit_ms is not None and seconds is not None and seconds * 1e3 > limit_ms:
            return False
    return True


def summarise(records: Sequence[StreamRecord], goodput: Goodput | None = None) -> Figures:
    """Figures of one run's records."""
    good = [record for record in records if record.error is None]
    duration = max((record.end_s for record in records), default=0.0)
    num_input = sum(record.prompt_tokens or 0 for record in good)
    num_output = sum(record.completion_tokens or 0 for record in good)

    def rate(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    latencies: dict[str, float] = {}
    samples: dict[str, list[float | None]] = {
        "ttft": [record.ttft_s for record in good],
        "tpot": [tpot_s(record) for record in good],
        "itl": [gap for record in good for gap in record.itls_s],
        "e2el": [record.latency_s for record in good],
    }
    for name, values in samples.items():
        latencies |= spread(name, [value for value in values if value is not None])
    return Figures(
        duration=duration,
        completed=len(good),
        failed=len(records) - len(good),
        errors=dict(Counter(r.error for r in records if r.error is not None).most_common()),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=rate(len(good)),
        output_throughput=rate(num_output),
        total_token_throughput=rate(num_input + num_output),
        request_goodput=None
        if goodput is None
        else rate(sum(is_good(record, goodput) for record in good)),
        latencies=latencies,
    )


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, deviation, percentiles and maximum of a metric, in milliseconds."""
    if not seconds:
        return {}
    values = np.asarray(seconds) * 1e3
    figures = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    for percent in PERCENTILES:
        figures[f"p{percent}_{name}_ms"] = float(np.percentile(values, percent))
    figures[f"max_{name}_ms"] = float(values.max())
    return figures
