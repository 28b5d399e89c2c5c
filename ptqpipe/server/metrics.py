"""What /metrics answers, in Prometheus' format: counted here, or read from the engine when asked.

A registry of its own, so that several servers can live in one process.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ptqpipe.engine import Service, State

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


AllReduceStats = Callable[[], Mapping[str, int] | None]
"""What the ranks' sums have cost since the start, as this rank saw them; None without ranks.

quantized, plain  how many there were; values, wire: bytes of the quantized ones, before and after
"""


class Metrics:
    """The server's own counters, and the engine's."""

    def __init__(self, service: Service, *, all_reduce: AllReduceStats | None = None) -> None:
        self.registry = CollectorRegistry()
        add = self.registry
        self._http = Counter(
            "ptqpipe_http_requests", "HTTP requests by route and status.", ("route", "status"), registry=add
        )
        self._refused = Counter("ptqpipe_requests_refused", "Requests not taken.", ("status",), registry=add)
        self._ended = Counter("ptqpipe_sequences_finished", "Sequences by reason.", ("reason",), registry=add)
        self._first = Histogram("ptqpipe_time_to_first_token_seconds", "From arrival.", buckets=_FIRST, registry=add)
        self._next = Histogram("ptqpipe_inter_token_seconds", "Between tokens.", buckets=_NEXT, registry=add)
        self._whole = Histogram("ptqpipe_sequence_seconds", "Arrival to end.", buckets=_WHOLE, registry=add)
        self.registry.register(_EngineCollector(service, all_reduce))

    def http(self, route: str, status: int) -> None:
        """An HTTP request was answered."""
        self._http.labels(route, str(status)).inc()

    def refused(self, status: int) -> None:
        """Counts a completion that was rejected."""
        self._refused.labels(str(status)).inc()

    def first_token(self, seconds: float) -> None:
        """A sequence has its first token."""
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """A sequence has a further token."""
        self._next.observe(seconds)

    def ended(self, reason: str, seconds: float) -> None:
        """A sequence has its last token."""
        self._ended.labels(reason).inc()
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine's numbers when Prometheus asks."""

    def __init__(self, service: Service, all_reduce: AllReduceStats | None) -> None:
        self._service, self._all_reduce = service, all_reduce

    def collect(self) -> Iterable[Metric]:
        """The families."""
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        load = self._service.load()
        up = self._service.state is State.READY
        used = (load.blocks - load.free) / load.blocks if load.blocks else 0.0
        for name, text, value in (
            ("up", "1 when requests are taken.", float(up)),
            ("sequences_running", "Sequences in the current step.", load.running),
            ("sequences_waiting", "Sequences in the queue.", load.waiting),
            ("kv_cache_usage_ratio", "Part of the cache's pages that sequences hold.", used),
            ("kv_cache_blocks", "Pages of the cache.", load.blocks),
        ):
            yield GaugeMetricFamily(f"ptqpipe_{name}", text, value=value)

    def _counters(self) -> Iterator[Metric]:
        engine = self._service.engine
        if engine is None:
            return
        counters = engine.counters
        rows: list[tuple[str, str, float]] = [
            ("prompt_tokens", "Tokens of prompts computed.", counters.prompt_tokens),
            ("cached_prompt_tokens", "Tokens of prompts found in the cache.", counters.cached_tokens),
            ("generated_tokens", "Tokens sampled.", counters.generated_tokens),
            ("recomputed_tokens", "Tokens computed again after preemption.", counters.recomputed_tokens),
            ("engine_steps", "Steps of the engine.", counters.steps),
            ("preemptions", "Sequences put back for lack of pages.", self._service.load().preemptions),
        ]
        for name, text, value in rows:
            yield CounterMetricFamily(f"ptqpipe_{name}", text, value=value)
        sums = None if self._all_reduce is None else self._all_reduce()
        if sums is not None:
            for name, text, label, kinds in (
                ("calls", "Sums over the ranks.", "kind", ("quantized", "plain")),
                ("bytes", "Of quantized sums, this rank's.", "what", ("values", "wire")),
            ):
                family = CounterMetricFamily(f"ptqpipe_allreduce_{name}", text, labels=(label,))
                for kind in kinds:
                    family.add_metric((kind,), sums[kind])
                yield family
