"""Prometheus metrics, read from the engine's counters when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from .service import Service

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """`observe_step` is called by the engine's thread; the rest is collected on demand."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.service: Service | None = None
        steps = Histogram("samebits_step_seconds", "Time of a step", buckets=STEP_BUCKETS, registry=self.registry)
        self.observe_step = steps.observe
        self.registry.register(self)  # type: ignore[arg-type]

    def collect(self) -> Iterator[Metric]:
        """The gauges and counters as of now."""
        if self.service is None:
            return
        load = self.service.load()
        engine = self.service.engine
        usage = load.kv_blocks_used / max(load.kv_blocks_total, 1)  # 0: no replica serves
        rows = (
            (GaugeMetricFamily, "requests_running", "Sequences that run", load.num_running),
            (GaugeMetricFamily, "requests_waiting", "Sequences that wait", load.num_waiting),
            (GaugeMetricFamily, "kv_cache_usage_ratio", "Part of the KV cache in use", usage),
            (GaugeMetricFamily, "weight_version", "Weight updates so far", load.weight_version),
            (GaugeMetricFamily, "paused", "1 while generation is paused", engine.state.paused.is_set()),
            (CounterMetricFamily, "prompt_tokens", "Prompt tokens computed", load.prompt_tokens_computed),
            (CounterMetricFamily, "generation_tokens", "Tokens sampled", load.generation_tokens),
            (CounterMetricFamily, "prefix_cache_hit_tokens", "Prompt tokens in the cache", load.prefix_hit_tokens),
            (CounterMetricFamily, "draft_tokens", "Tokens drafted", load.draft_tokens),
            (CounterMetricFamily, "accepted_tokens", "Drafted tokens that were sampled", load.accepted_tokens),
            (CounterMetricFamily, "preemptions", "Sequences whose KV was taken for others", load.preemptions),
        )
        for family, name, text, value in rows:
            yield family(f"samebits_{name}", text, float(value))
        finished = CounterMetricFamily("samebits_samples_finished", "Samples by finish reason", labels=["reason"])
        for reason, count in sorted(engine.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        labels = {"version": self.service.updates.label, "contract": str(self.service.contract_hash)}
        yield InfoMetricFamily("samebits_weights", "The weights in force, by the client's name", labels)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
