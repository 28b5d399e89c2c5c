"""What /metrics answers, in Prometheus' format: counted here, or read from the engine when asked.

What vLLM measures, too, has vLLM's name and its label ``model_name``, so that dashboards made for vLLM show this
server; the rest is called ``ptqpipe_...``. What vLLM calls a request is one sequence here: a call with ``n`` of 3 is
three. A registry of its own, so that several servers can live in one process.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ptqpipe.serving.engine import Counters, Finish, Service, State, TokenOutput

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 80.0)
_LONG = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token, in seconds.", _SHORT),
    "inter_token_latency_seconds": ("Time between two tokens of a request, in seconds.", _SHORT),
    "request_time_per_output_token_seconds": (
        "Mean time between the tokens of a finished request, in seconds; one value for each request.",
        _SHORT,
    ),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its last token, in seconds.", _LONG),
    "request_queue_time_seconds": ("Time that a request waited before it was computed, in seconds.", _LONG),
    "request_prefill_time_seconds": ("Time from the first step of a request to its first token, in seconds.", _LONG),
    "request_decode_time_seconds": ("Time from the first token of a request to its last one, in seconds.", _LONG),
    "request_inference_time_seconds": ("Time from the first step of a request to its last token, in seconds.", _LONG),
    "request_prompt_tokens": ("Tokens in the prompt of a finished request.", _TOKENS),
    "request_generation_tokens": ("Tokens that a finished request got.", _TOKENS),
}
_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CANCELLED: "abort"}  # vLLM's words


AllReduceStats = Callable[[], Mapping[str, int] | None]
"""What the ranks' sums have cost since the start, as this rank saw them; None without ranks.

quantized, plain  how many there were; values, wire: bytes of the quantized ones, before and after
"""


class Metrics:
    """The server's own counters, and the engine's. ``model``: the value of the label model_name."""

    def __init__(self, service: Service, model: str, *, all_reduce: AllReduceStats | None = None) -> None:
        self.registry = CollectorRegistry()
        add, label = self.registry, ("model_name",)
        self._http = Counter(
            "ptqpipe_http_requests", "HTTP requests by route and status code.", ("route", "status"), registry=add
        )
        self._refused = Counter(
            "ptqpipe_requests_refused",
            "Requests that were refused because the queue was full (429) or no request was taken (503).",
            ("status",),
            registry=add,
        )
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended: at an end token or stop string (stop), at a limit of tokens (length), because the "
            "client left (abort), or by an error (error).",
            (*label, "finished_reason"),
            registry=add,
        )
        for reason in (*_REASONS.values(), "error"):
            self._ended.labels(model, reason)
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, label, buckets=buckets, registry=add).labels(model)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._model = model
        self.registry.register(_EngineCollector(service, model, all_reduce))

    def http(self, route: str, status: int) -> None:
        """An HTTP request was answered."""
        self._http.labels(route, str(status)).inc()

    def refused(self, status: int) -> None:
        """Counts a completion that was rejected."""
        self._refused.labels(str(status)).inc()

    def observe(self, **values: float) -> None:
        """Adds a value to each histogram that is named, without its prefix."""
        for name, value in values.items():
            self._histograms[name].observe(value)

    def ended(self, reason: str) -> None:
        """A sequence has its last piece. ``reason``: stop, length, abort or error."""
        self._ended.labels(self._model, reason).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


@dataclass(slots=True)
class RequestTimer:
    """Times of one sequence, from its arrival; all in seconds of the monotonic clock.

    prompt  tokens of its prompt
    """

    metrics: Metrics
    prompt: int
    arrived: float = field(default_factory=time.monotonic)
    begun: float | None = None
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def see(self, piece: TokenOutput) -> None:
        now = time.monotonic()
        if self.begun is None:
            self.begun = piece.begun
        if piece.tokens:
            if self.tokens == 0:
                self.first = now
                self.metrics.observe(time_to_first_token_seconds=now - self.arrived)
            else:
                self.metrics.observe(inter_token_latency_seconds=now - self.last)
            self.last = now
            self.tokens += len(piece.tokens)
        if piece.finish is not None:
            left = piece.finish is Finish.CANCELLED
            self.metrics.ended("error" if piece.error and not left else _REASONS[piece.finish])
            if not left and piece.error is None:
                self._finish(now)

    def _finish(self, now: float) -> None:
        """Observes the times of a sequence that has its whole answer, which may have no token."""
        begun = self.arrived if self.begun is None else self.begun
        first, last = (self.first, self.last) if self.tokens else (now, now)
        self.metrics.observe(
            e2e_request_latency_seconds=now - self.arrived,
            request_queue_time_seconds=begun - self.arrived,
            request_prefill_time_seconds=first - begun,
            request_decode_time_seconds=last - first,
            request_inference_time_seconds=last - begun,
            request_prompt_tokens=self.prompt,
            request_generation_tokens=self.tokens,
        )
        if self.tokens > 1:
            self.metrics.observe(request_time_per_output_token_seconds=(last - first) / (self.tokens - 1))


class _EngineCollector(Collector):
    """Reads the engine's numbers when Prometheus asks."""

    def __init__(self, service: Service, model: str, all_reduce: AllReduceStats | None) -> None:
        self._service, self._model, self._all_reduce = service, model, all_reduce

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._sums()

    def _gauges(self) -> Iterator[Metric]:
        load = self._service.load()
        for name, text, value in (
            ("num_requests_running", "Requests that are being computed.", load.running),
            ("num_requests_waiting", "Requests in the queue.", load.waiting),
            ("kv_cache_usage_perc", "Part of the KV cache that requests use; 1 is all of it.", load.cache_use),
        ):
            yield self._of_model(GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"]), value)
        up = self._service.state is State.READY
        yield GaugeMetricFamily("ptqpipe_up", "1 while requests are taken, 0 while loading or ending.", value=float(up))
        yield GaugeMetricFamily("ptqpipe_kv_cache_blocks", "Pages of the KV cache.", value=load.blocks)

    def _counters(self) -> Iterator[Metric]:
        engine = self._service.engine
        if engine is None:
            return
        counters = engine.counters
        whole = counters.prompt_tokens + counters.cached_tokens
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts, computed or found in the cache.", whole),
            ("generation_tokens", "Tokens that were generated.", counters.generated_tokens),
            ("prefix_cache_queries", "Tokens of prompts that were looked for in the cache.", whole),
            ("prefix_cache_hits", "Tokens of prompts that were found in the cache.", counters.cached_tokens),
            (
                "num_preemptions",
                "Requests put back into the queue for lack of cache.",
                self._service.load().preemptions,
            ),
        ):
            yield self._of_model(CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"]), value)
        if engine.drafter is not None:
            yield from self._drafts(engine.counters)
        recomputed = "Tokens computed again for requests that were put back into the queue."
        yield CounterMetricFamily("ptqpipe_recomputed_tokens", recomputed, value=counters.recomputed_tokens)
        yield CounterMetricFamily("ptqpipe_engine_steps", "Passes through the model.", value=counters.steps)

    def _drafts(self, counters: Counters) -> Iterator[Metric]:
        accepted = counters.accepted_tokens
        for name, text, value in (
            ("num_drafts", "Steps of a request that had drafts of its next tokens.", counters.drafts),
            ("num_draft_tokens", "Tokens that were drafted and computed.", counters.draft_tokens),
            ("num_accepted_tokens", "Drafted tokens that the model itself sampled.", sum(accepted.values())),
        ):
            yield self._of_model(CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=["model_name"]), value)
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place among the drafts, from 0.",
            labels=["model_name", "position"],
        )
        for place in sorted(accepted):
            by_place.add_metric([self._model, str(place)], accepted[place])
        yield by_place

    def _of_model(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric([self._model], value)
        return family

    def _sums(self) -> Iterator[Metric]:
        sums = None if self._all_reduce is None else self._all_reduce()
        if sums is not None:
            for name, text, label, kinds in (
                ("calls", "All-reduces over the ranks, quantized or plain.", "kind", ("quantized", "plain")),
                (
                    "bytes",
                    "Bytes of quantized all-reduces of this rank: their values before, and what went over the wire.",
                    "what",
                    ("values", "wire"),
                ),
            ):
                family = CounterMetricFamily(f"ptqpipe_allreduce_{name}", text, labels=(label,))
                for kind in kinds:
                    family.add_metric((kind,), sums[kind])
                yield family
