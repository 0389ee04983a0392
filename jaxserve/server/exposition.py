"""The engine's metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxserve.metrics.metrics import Metric
from jaxserve.metrics.statistics import HistogramValue

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Exposition:
    """Prometheus exposition of what `metrics` returns at scrape time, and of process metrics.

    Each metric has the label model_name, as in vLLM, whose dashboards rely on it.
    """

    def __init__(self, metrics: Callable[[], Mapping[str, Metric]], model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(metrics, model_name))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Metrics(Collector):
    def __init__(self, metrics: Callable[[], Mapping[str, Metric]], model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name

    def describe(self) -> Iterable[Family]:
        return ()  # Otherwise register() would call collect().

    def collect(self) -> Iterable[Family]:
        for name, metric in self._metrics().items():
            yield self._family(name, metric)

    def _family(self, name: str, metric: Metric) -> Family:
        labels, values = ["model_name"], [self._model_name]
        if metric.kind == "histogram":
            family = HistogramMetricFamily(name, metric.help, labels=labels)
            family.add_metric(values, _buckets(metric.value), metric.value.sum)
            return family
        if metric.kind == "info":
            family = GaugeMetricFamily(name, metric.help, labels=[*labels, *metric.value])
            family.add_metric([*values, *metric.value.values()], 1)
            return family
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        if metric.label is None:
            family = kind(name, metric.help, labels=labels)
            family.add_metric(values, metric.value)
            return family
        family = kind(name, metric.help, labels=[*labels, metric.label])
        for label, value in metric.value.items():
            family.add_metric([*values, label], value)
        return family


def _buckets(value: HistogramValue) -> list[tuple[str, float]]:
    return [(floatToGoString(bound), count) for bound, count in value.buckets]
