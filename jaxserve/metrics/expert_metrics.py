"""Metrics of mixtures of experts: how evenly tokens are spread."""

from __future__ import annotations

from jaxserve.core.steps.expert_loads import ExpertLoads
from jaxserve.metrics.metric import Metric


def expert_metrics(loads: ExpertLoads | None) -> dict[str, Metric]:
    """Metrics by exported name; none where no tokens are counted."""
    if loads is None:
        return {}
    by_expert = {str(expert): count for expert, count in enumerate(loads.by_expert)}
    return {
        "jaxserve:expert_tokens_total": Metric(
            "counter", "Tokens that took an expert, over all layers", by_expert, label="expert"
        ),
        "jaxserve:expert_balancedness": Metric(
            "gauge",
            "Tokens of an average expert by those of the most loaded one, the mean over layers",
            loads.balancedness,
        ),
    }
