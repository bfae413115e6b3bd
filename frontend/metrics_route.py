"""GET /metrics: the engine's counters under vLLM's names, in Prometheus' formats.

Owns names, units and labels; the numbers come from the core at each scrape, so that every frontend
tells the same. Called by Starlette.
"""

from collections.abc import Awaitable, Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response

from cearx.core.messages import EngineMetrics, EngineReady
from cearx.core.metrics import Counters, Histogram
from cearx.frontend.server_state import ServerState

LABELS = ("model_name", "engine")
ENGINE = "0"
SECOND_US = 1_000_000

COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("vllm:prefix_cache_queries", "num_lookup_tokens", "Prompt tokens looked up in the cache."),
    ("vllm:prefix_cache_hits", "num_hit_tokens", "Prompt tokens found in the cache."),
    ("vllm:num_preemptions", "num_preemptions", "Preemptions."),
    ("vllm:prompt_tokens", "num_prompt_tokens", "Prompt tokens of requests with a first token."),
    ("vllm:prompt_tokens_cached", "num_cached_prompt_tokens", "Of these, from the cache."),
    ("vllm:generation_tokens", "num_generated_tokens", "Generated tokens."),
    ("cearx:requests_received", "num_received", "Requests that reached the core."),
    ("cearx:requests_impossible", "num_refused_impossible", "Refused: they can never run."),
    ("cearx:recomputed_tokens", "num_recomputed_tokens", "Computed again after a preemption."),
    ("cearx:steps", "num_steps", "Steps of the engine."),
)
"""Name (without _total), field of `Counters`, what it counts."""

HISTOGRAMS: tuple[tuple[str, str, int, str], ...] = (
    ("vllm:time_to_first_token_seconds", "first_token_us", SECOND_US, "Time to the first token."),
    ("vllm:inter_token_latency_seconds", "inter_token_us", SECOND_US, "Time between tokens."),
    (
        "vllm:request_time_per_output_token_seconds",
        "per_token_us",
        SECOND_US,
        "Mean time between a request's tokens.",
    ),
    ("vllm:e2e_request_latency_seconds", "e2e_us", SECOND_US, "From request to last token."),
    ("vllm:request_queue_time_seconds", "queue_us", SECOND_US, "Time in the queue."),
    ("vllm:request_inference_time_seconds", "inference_us", SECOND_US, "Time behind the queue."),
    ("vllm:request_prefill_time_seconds", "prefill_us", SECOND_US, "Queue to first token."),
    ("vllm:request_decode_time_seconds", "decode_us", SECOND_US, "First to last token."),
    ("vllm:request_prompt_tokens", "prompt_tokens", 1, "Prompt tokens."),
    ("vllm:request_generation_tokens", "generated_tokens", 1, "Generated tokens."),
    ("vllm:request_max_num_generation_tokens", "generated_tokens", 1, "Generated tokens."),
    ("vllm:request_params_n", "num_choices", 1, "The parameter n."),
    ("vllm:request_params_max_tokens", "max_tokens", 1, "The parameter max_tokens."),
    ("vllm:request_num_preemptions", "num_preemptions", 1, "Preemptions of a request."),
    (
        "vllm:request_prefill_kv_computed_tokens",
        "computed_prefill_tokens",
        1,
        "Prompt tokens that were not in the cache.",
    ),
    ("vllm:iteration_tokens_total", "step_tokens", 1, "Tokens computed in a step."),
)
"""Name, field of `Histograms`, divisor of its values, what it counts."""


def metrics_endpoint(state: ServerState) -> Callable[[Request], Awaitable[Response]]:
    async def metrics(request: Request) -> Response:
        """In the format that the Accept header asks for; 503 when the engine does not serve."""
        engine = state.client.require_engine()
        answer = await state.client.read_metrics()
        registry = _Snapshot(list(families(answer, engine, state.model_name)))
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return metrics


class _Snapshot:
    """As much of a registry as the encoders look at."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> list[Metric]:
        return self._found


def families(answer: EngineMetrics, engine: EngineReady, model_name: str) -> Iterator[Metric]:
    """Every metric, with the values of `answer`."""
    labels = (model_name, ENGINE)
    yield from _gauges(answer, engine, labels)
    for name, field, text in COUNTERS:
        counter = CounterMetricFamily(name, text, labels=LABELS)
        counter.add_metric(labels, getattr(answer.counters, field))
        yield counter
    yield from _labelled_counters(answer.counters, labels)
    for name, field, divisor, text in HISTOGRAMS:
        yield _histogram(name, text, labels, getattr(answer.histograms, field), divisor)


def _gauges(
    answer: EngineMetrics, engine: EngineReady, labels: tuple[str, str]
) -> Iterator[Metric]:
    load = answer.load
    used = 1 - load.num_free_blocks / engine.num_blocks
    for name, value, text in (
        ("vllm:num_requests_running", load.num_running, "Requests that run."),
        ("vllm:num_requests_waiting", load.num_waiting, "Requests that wait."),
        ("vllm:kv_cache_usage_perc", used, "Share of the KV blocks that is in use, 0 to 1."),
    ):
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(labels, value)
        yield gauge
    by_reason = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait: for room, or for a step in flight.",
        labels=(*LABELS, "reason"),
    )
    by_reason.add_metric((*labels, "capacity"), load.num_waiting - load.num_deferred)
    by_reason.add_metric((*labels, "deferred"), load.num_deferred)
    yield by_reason
    config = {
        "block_size": str(engine.block_size),
        "num_gpu_blocks": str(engine.num_blocks),
        "enable_prefix_caching": str(engine.enable_prefix_caching),
        "engine": ENGINE,
    }
    info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=tuple(config))
    info.add_metric(tuple(config.values()), 1)
    yield info


def _labelled_counters(counters: Counters, labels: tuple[str, str]) -> Iterator[Metric]:
    computed = counters.num_prompt_tokens - counters.num_cached_prompt_tokens
    cached = counters.num_cached_prompt_tokens
    for name, text, label, values in (
        (
            "vllm:request_success",
            "Requests that ended.",
            "finished_reason",
            {
                "stop": counters.num_stopped,
                "length": counters.num_at_length,
                "abort": counters.num_aborted,
                "error": counters.num_failed,
            },
        ),
        (
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            "source",
            {"local_compute": computed, "local_cache_hit": cached},
        ),
        (
            "vllm:prompt_tokens_cached_by_source",
            "Prompt tokens by the cache that held them.",
            "source",
            {"device": cached},
        ),
    ):
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*labels, key), value)
        yield family
    rejections = CounterMetricFamily(
        "vllm:admission_rejections", "Requests that found the queue full.", labels=("reason",)
    )
    rejections.add_metric(("max_num_queued_reqs",), counters.num_refused_queue_full)
    rejections.add_metric(("max_num_queued_tokens",), counters.num_refused_queue_tokens)
    yield rejections


def _histogram(
    name: str, text: str, labels: tuple[str, str], histogram: Histogram, divisor: int
) -> Metric:
    cumulative = 0
    buckets: list[tuple[str, float]] = []
    bounds = [str(float(bound / divisor)) for bound in histogram.bounds]
    for bound, count in zip([*bounds, "+Inf"], histogram.counts, strict=True):
        cumulative += count
        buckets.append((bound, cumulative))
    family = HistogramMetricFamily(name, text, labels=LABELS)
    family.add_metric(labels, buckets, histogram.total / divisor)
    return family
