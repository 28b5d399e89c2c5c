"""Claims about /metrics and the log: vLLM's names with what they mean, and lines where there was work alone."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ptqpipe.serving.engine import Service, State
from ptqpipe.serving.engine.engine import Counters
from ptqpipe.serving.engine.service import Load
from ptqpipe.serving.server.metrics import Metrics
from ptqpipe.serving.server.uvicorn_server import Throughput
from tests.serving.engine.models import PROMPTS, encoded
from tests.serving.server.conftest import Server, serving

# What the queries of vLLM's dashboard name, from its repository (examples, prometheus_grafana).
DASHBOARD = {
    *("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds"),
    *("prompt_tokens", "generation_tokens", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("request_prompt_tokens", "request_generation_tokens", "request_success", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "num_preemptions"),
}


@pytest.fixture(scope="module")
def fresh() -> Iterator[Server]:
    """A server that nobody else asks."""
    with serving() as found:
        yield found


def families(http: httpx.Client) -> dict[str, Any]:
    """By name, what Prometheus' own parser makes of /metrics."""
    return {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}


def samples(http: httpx.Client, **labels: str) -> dict[str, float]:
    """The samples with these labels by name, prefix left out."""
    found = [sample for family in families(http).values() for sample in family.samples]
    return {x.name.removeprefix("vllm:"): x.value for x in found if labels.items() <= x.labels.items()}


def test_the_names_of_vllms_dashboard_are_there_with_the_models_name(fresh: Server) -> None:
    with fresh.client() as http:
        found = families(http)
    assert {f"vllm:{name}" for name in DASHBOARD} - found.keys() == set()
    for name, family in found.items():
        assert len(family.documentation) > 15, name
        if name.startswith("vllm:"):
            assert {sample.labels.get("model_name") for sample in family.samples} == {"demo"}


def test_tokens_times_and_reasons_are_counted(fresh: Server) -> None:
    prompt = len(encoded()[2])
    body = {"prompt": PROMPTS[2], "max_tokens": 9, "n": 2, "temperature": 0, "ignore_eos": True}
    with fresh.client() as http:
        before, began = samples(http, model_name="demo"), time.monotonic()
        assert http.post("/v1/completions", json=body).status_code == 200
        took = time.monotonic() - began
        after = samples(http, model_name="demo")
        ended = samples(http, finished_reason="length")
    change = {name: after[name] - before[name] for name in after}
    assert change["generation_tokens_total"] == 18
    assert change["prompt_tokens_total"] == change["prefix_cache_queries_total"] == 2 * prompt
    assert change["prefix_cache_hits_total"] == (prompt - 1) // 16 * 16  # what the second finds: whole pages
    assert (change["request_prompt_tokens_sum"], change["request_generation_tokens_sum"]) == (2 * prompt, 18)
    assert change["time_to_first_token_seconds_count"] == 2
    assert change["inter_token_latency_seconds_count"] == 2 * 8
    assert ended["request_success_total"] == 2
    whole = change["e2e_request_latency_seconds_sum"]
    parts = (f"request_{part}_time_seconds_sum" for part in ("queue", "prefill", "decode"))
    assert 0 < sum(change[part] for part in parts) <= whole <= 2 * took
    assert change["request_decode_time_seconds_sum"] == pytest.approx(change["inter_token_latency_seconds_sum"])


def test_drafts_are_counted_by_vllms_names() -> None:
    counters = Counters(drafts=5, draft_tokens=9, accepted_tokens={0: 4, 1: 2})
    engine = SimpleNamespace(counters=counters, drafter=object())
    service = SimpleNamespace(load=Load, state=State.READY, engine=engine)
    made = Metrics(cast(Service, service), "demo")
    found = {
        (sample.name.removeprefix("vllm:spec_decode_"), sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(made.text().decode())
        for sample in family.samples
        if "spec_decode" in sample.name
    }
    assert found == {
        ("num_drafts_total", None): 5,
        ("num_draft_tokens_total", None): 9,
        ("num_accepted_tokens_total", None): 6,
        ("num_accepted_tokens_per_pos_total", "0"): 4,
        ("num_accepted_tokens_per_pos_total", "1"): 2,
    }
    engine.drafter = None
    assert b"spec_decode" not in made.text()


def test_a_client_that_leaves_counts_as_aborted() -> None:
    body = {"prompt": "Return", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with serving(slow=0.05) as server, server.client() as http:
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # httpx closes the connection once nobody holds this
            next(lines)
            assert samples(http, model_name="demo")["num_requests_running"] == 1
        until = time.monotonic() + 60
        while samples(http, finished_reason="abort")["request_success_total"] == 0:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert samples(http, model_name="demo")["e2e_request_latency_seconds_count"] == 0


def test_the_log_has_a_line_where_there_was_work_and_none_without() -> None:
    now = [0.0]
    counters, load = Counters(), [Load()]
    service = SimpleNamespace(engine=SimpleNamespace(counters=counters), load=lambda: load[0])
    throughput = Throughput(cast(Service, service), clock=lambda: now[0])
    now[0] = 10.0
    assert throughput.line() is None
    counters.prompt_tokens, counters.generated_tokens = 1000, 55
    load[0] = Load(running=3, waiting=2, blocks=80, free=60)
    now[0] = 20.0
    assert throughput.line() == ("prompts 100.0, generation 5.5 tokens/s; running 3, waiting 2; KV cache 25.0 %")
    now[0] = 30.0
    stuck = throughput.line()
    assert stuck is not None
    assert stuck.startswith("prompts 0.0, generation 0.0 tokens/s; running 3")
    load[0], now[0] = Load(blocks=80, free=80), 40.0
    assert throughput.line() is None


def test_requests_are_lines_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(access_log=True) as server, server.client() as http:
        http.get("/health")
    line = next(line for line in capsys.readouterr().err.splitlines() if "/health" in line)
    assert line.endswith('"GET /health HTTP/1.1" 200 OK')
    with serving() as server, server.client() as http:
        http.get("/health")
    assert "/health" not in capsys.readouterr().err


def test_a_client_neither_forges_a_line_nor_leaves_its_key_there(capsys: pytest.CaptureFixture[str]) -> None:
    headers = {"x-forwarded-for": '9.9.9.9 evil "x" 200', "x-forwarded-proto": "https", "forwarded": "for=9.9.9.9"}
    with serving(access_log=True) as server, server.client(**headers) as http:
        http.get("/health?key=SECRET&x=%0a127.0.0.1")
        http.get("/v1/models%0aFORGED?key=SECRET")
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if "GET" in line]
    assert [line.partition(" 127.0.0.1:")[2].partition(" ")[2] for line in lines] == [
        '"GET /health HTTP/1.1" 200 OK',
        '"GET /v1/models%0AFORGED HTTP/1.1" 404 Not Found',
    ]
    assert "SECRET" not in said
    assert "9.9.9.9" not in said
