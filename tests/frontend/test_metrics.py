"""GET /metrics and /load: names, types and numbers as dashboards and balancers read them."""

import re
from pathlib import Path

import httpx
import msgspec
import pytest
from frontend_server import MODEL, FrontendServer, frontend_server
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from cearx.core.metrics import EngineLoad
from cearx.frontend import core_questions

NAMES = {
    "gauge": "num_requests_running num_requests_waiting num_requests_waiting_by_reason"
    " kv_cache_usage_perc cache_config_info",
    "counter": "prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens"
    " prompt_tokens_by_source prompt_tokens_cached prompt_tokens_cached_by_source"
    " generation_tokens request_success admission_rejections",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds"
    " request_time_per_output_token_seconds e2e_request_latency_seconds"
    " request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds"
    " request_decode_time_seconds request_prompt_tokens request_generation_tokens"
    " request_max_num_generation_tokens request_params_n request_params_max_tokens"
    " request_num_preemptions request_prefill_kv_computed_tokens iteration_tokens_total",
}
LABELS = {"model_name": MODEL, "engine": "0"}


def scrape(server: FrontendServer) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = server.http.get("/metrics").raise_for_status().text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def test_names_and_types_are_those_that_dashboards_know() -> None:
    """Both formats parse with Prometheus' own parsers and hold every name with its type."""
    with frontend_server() as server:
        for accept, parse in (
            ("text/plain", parse_text),
            ("application/openmetrics-text; version=1.0.0", parse_openmetrics),
        ):
            answer = server.http.get("/metrics", headers={"accept": accept})
            assert answer.headers["content-type"].startswith(accept.split(";")[0])
            types = {family.name: family.type for family in parse(answer.text)}
            for kind, names in NAMES.items():
                for name in names.split():
                    assert types[f"vllm:{name}"] == kind, name


def test_numbers_are_the_cores() -> None:
    """Counts, gauges and histograms are what the core told, in seconds and shares."""
    with frontend_server() as server:
        core = server.core
        core.load = EngineLoad(num_running=3, num_waiting=5, num_deferred=2, num_free_blocks=16)
        core.counters.num_stopped = 7
        core.counters.num_prompt_tokens, core.counters.num_cached_prompt_tokens = 100, 30
        core.counters.num_refused_queue_full = 4
        core.histograms.inter_token_us.observe(25_000, 3)
        core.histograms.inter_token_us.observe(90_000_000)
        found = scrape(server)

        def value(name: str, **labels: str) -> float:
            return found[f"vllm:{name}", frozenset({**LABELS, **labels}.items())]

        assert value("num_requests_running") == 3
        assert value("num_requests_waiting") == 5
        assert value("num_requests_waiting_by_reason", reason="capacity") == 3
        assert value("num_requests_waiting_by_reason", reason="deferred") == 2
        assert value("kv_cache_usage_perc") == 0.75
        assert value("request_success_total", finished_reason="stop") == 7
        assert value("prompt_tokens_by_source_total", source="local_compute") == 70
        assert value("prompt_tokens_cached_total") == 30
        assert value("inter_token_latency_seconds_bucket", le="0.01") == 0
        assert value("inter_token_latency_seconds_bucket", le="0.025") == 3
        assert value("inter_token_latency_seconds_bucket", le="80.0") == 3
        assert value("inter_token_latency_seconds_bucket", le="+Inf") == 4
        assert value("inter_token_latency_seconds_count") == 4
        assert value("inter_token_latency_seconds_sum") == pytest.approx(90.075)
        rejected = frozenset({("reason", "max_num_queued_reqs")})
        assert found["vllm:admission_rejections_total", rejected] == 4
        assert server.http.get("/load").json()["server_load"] == 8


def test_a_request_tells_when_it_came_and_its_n() -> None:
    """The core learns the time in the frontend, and n once for each prompt."""
    with frontend_server() as server:
        server.post("/v1/completions", model=MODEL, prompt=["a", "b"], n=2, max_tokens=1)
        submits = server.core.submits
        assert [submit.num_choices for submit in submits] == [2, 0, 2, 0]
        assert len({submit.received_us for submit in submits}) == 1
        assert submits[0].received_us is not None


def test_no_engine_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """503 with a reason while the core is silent, and when it is gone: never stale numbers."""
    monkeypatch.setattr(core_questions, "ANSWER_WITHIN_S", 0.05)
    with frontend_server() as server:
        server.core.answers_metrics = False
        answer = server.http.get("/metrics")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_busy")
        server.core.die()
        codes = {503}
        while codes == {503} and answer.json()["error"]["code"] != "engine_lost":
            answer = server.http.get("/metrics")
            codes.add(answer.status_code)
        assert codes == {503}
        assert isinstance(answer, httpx.Response)


def test_the_dashboard_asks_for_what_there_is() -> None:
    """Every expression of the Grafana file names samples that /metrics has."""
    file = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
    panels = msgspec.json.decode(file.read_bytes())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"vllm:\w+", target["expr"])
    }
    with frontend_server() as server:
        assert len(asked) > 15
        assert asked <= {name for name, _ in scrape(server)}
