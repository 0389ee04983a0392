"""The metrics of a router, beside those of its replicas' engines."""

from __future__ import annotations

from jaxserve.cluster.open_requests import OpenRequests
from jaxserve.cluster.replicas.routed_replica import RoutedReplica
from jaxserve.core.cluster_status import ScalingStatus
from jaxserve.metrics.metric import Metric


def replica_metrics(replica: RoutedReplica) -> dict[str, Metric]:
    """What the router knows of one replica."""
    return {
        "jaxserve:replica_up": Metric(
            "gauge", "Whether requests are dispatched to it", not replica.load.draining
        ),
        "jaxserve:replica_restarts_total": Metric(
            "counter", "Times that it was lost and loaded again", replica.num_losses
        ),
    }


def pool_metrics(
    requests: OpenRequests, num_replicas: int, scaling: ScalingStatus | None
) -> dict[str, Metric]:
    """Those of all replicas. `scaling`: what autoscaling has done, if their number changes."""
    copies = requests.copies
    counters = {
        "pulled_prefix_tokens": (
            "Prompt tokens whose KV was copied from another replica",
            requests.num_pulled_tokens,
        ),
        "redispatched_requests": (
            "Requests dispatched again, of lost replicas",
            requests.num_redispatched,
        ),
        "moved_requests": ("Requests moved to another replica, with their KV", requests.num_moved),
        "moved_kv_tokens": ("Tokens whose KV was copied of requests that move", copies.copied),
        "moved_kv_tokens_during_prefill": (
            "Of those, tokens whose KV was copied while later ones of their prompt were computed",
            copies.during_prefill,
        ),
        "moved_uncopied_tokens": (
            "Tokens of moved requests whose KV the new replica has to compute",
            copies.left,
        ),
    }
    if scaling is not None:
        counters["replicas_added"] = ("Replicas added by autoscaling", scaling.num_added)
        counters["replicas_removed"] = ("Replicas removed by autoscaling", scaling.num_removed)
    found = {
        f"jaxserve:{name}_total": Metric("counter", what, value)
        for name, (what, value) in counters.items()
    }
    if scaling is not None:
        what = "Replicas, those that load or drain among them"
        found["jaxserve:replicas"] = Metric("gauge", what, num_replicas)
    return found
