"""The engine's metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxserve.metrics.metric import Metric
from jaxserve.metrics.statistics import HistogramValue

MetricFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Exposition:
    """Metrics of an engine or its replicas, and of the process, as Prometheus reads them.

    Each metric has the label model_name, as in vLLM, whose dashboards rely on it, and those of
    several replicas the label replica.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def text(self, by_replica: Mapping[str, Mapping[str, Metric]]) -> bytes:
        """The metrics by replica and name; those under "" are of none in particular."""
        registry = CollectorRegistry()
        registry.register(_Metrics(by_replica, self._model_name))
        return generate_latest(registry) + generate_latest(self._process)


class _Metrics(Collector):
    def __init__(self, by_replica: Mapping[str, Mapping[str, Metric]], model_name: str) -> None:
        self._model_name = model_name
        self._by_name: dict[str, dict[str, Metric]] = {}
        for replica, metrics in by_replica.items():
            for name, metric in metrics.items():
                self._by_name.setdefault(name, {})[replica] = metric

    def describe(self) -> Iterable[MetricFamily]:
        return ()  # Otherwise register() would call collect().

    def collect(self) -> Iterable[MetricFamily]:
        for name, by_replica in self._by_name.items():
            yield self._family(name, by_replica)

    def _family(self, name: str, by_replica: Mapping[str, Metric]) -> MetricFamily:
        """One metric, of each replica that has it."""
        labels = ["model_name", *(["replica"] if any(by_replica) else [])]
        first = next(iter(by_replica.values()))
        if first.kind == "histogram":
            family = HistogramMetricFamily(name, first.help, labels=labels)
        else:
            more = list(first.value) if first.kind == "info" else [first.label]
            kind = CounterMetricFamily if first.kind == "counter" else GaugeMetricFamily
            labels += [label for label in more if label is not None]
            family = kind(name, first.help, labels=labels)
        for replica, metric in by_replica.items():
            values = [self._model_name, replica][: 1 + any(by_replica)]
            if metric.kind == "histogram":
                family.add_metric(values, _buckets(metric.value), metric.value.sum)
            elif metric.kind == "info":
                family.add_metric([*values, *metric.value.values()], 1)
            elif metric.label is None:
                family.add_metric(values, metric.value)
            else:
                for label, value in metric.value.items():
                    family.add_metric([*values, label], value)
        return family


def _buckets(value: HistogramValue) -> list[tuple[str, float]]:
    return [(floatToGoString(bound), count) for bound, count in value.buckets]
