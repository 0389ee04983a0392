"""The form of a metric that exporters get."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxserve.metrics.statistics import HistogramValue


@dataclass(frozen=True)
class Metric:
    """A snapshot of one metric, in the form that an exporter needs.

    `value` is a number or a `HistogramValue`; with `label` set it is a dict of numbers, one
    for each value of that label; of kind "info" it is a dict of labels, exported as a gauge of 1.
    Names of counters end in `_total`; times are in seconds.
    """

    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    value: float | HistogramValue | dict[str, float] | dict[str, str]
    label: str | None = None


counter = partial(Metric, "counter")
gauge = partial(Metric, "gauge")
histogram = partial(Metric, "histogram")
