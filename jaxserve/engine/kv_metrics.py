"""The state of the KV manager as metrics: what lies where, what became of it, what moving costs."""

from __future__ import annotations

from jaxserve.engine.metrics import Metric
from jaxserve.kv.manager import KVManager
from jaxserve.kv.tiers import Tier


def kv_metrics(kv: KVManager) -> dict[str, Metric]:
    """Metrics by the name they are exported under. What moved when is in the log, from which
    `Metrics` derives its own."""
    metrics = _pages(kv) | _counters(kv) | _rates(kv)
    return {f"jaxserve:{name}": metric for name, metric in metrics.items()}


def _pages(kv: KVManager) -> dict[str, Metric]:
    pool, shelves = kv.pool, kv.mover.shelves
    device = {"free": pool.num_free, "used": pool.num_used, "kept": pool.num_kept}
    return {
        "kv_pages": Metric(
            "gauge", "Pages of the device: free, used by sequences, or kept", device, "state"
        ),
        "kv_lower_pages": Metric(
            "gauge",
            "Pages taken on each tier below the device",
            {shelf.tier.value: shelf.num_used for shelf in shelves},
            "tier",
        ),
        "kv_lower_capacity_pages": Metric(
            "gauge",
            "Pages of each tier below the device",
            {shelf.tier.value: shelf.num_pages for shelf in shelves},
            "tier",
        ),
        "kv_nodes": Metric("gauge", "Pages of tokens that the prefix tree knows", len(kv.tree)),
        "kv_moves_under_way": Metric(
            "gauge", "Moves between tiers that have not ended", kv.mover.num_under_way
        ),
    }


def _counters(kv: KVManager) -> dict[str, Metric]:
    counters, moves = kv.counters, kv.mover.counters
    return {
        "kv_copied_pages_total": Metric(
            "counter", "Pages copied for a second writer", counters.copied_pages
        ),
        "kv_evicted_pages_total": Metric(
            "counter", "Kept pages taken for other tokens", counters.evicted_pages
        ),
        "kv_lost_pages_total": Metric(
            "counter",
            "Images given up while there was no other",
            counters.lost_pages + moves.lost_pages,
        ),
        "kv_preemptions_total": Metric(
            "counter",
            "Preempted sequences by what became of their KV",
            {"swap": counters.swaps, "recompute": counters.recomputes},
            "kind",
        ),
        "kv_saved_pages_total": Metric(
            "counter", "Pages saved on a lower tier", _by_tier(moves.saved_pages), "tier"
        ),
        "kv_fetched_pages_total": Metric(
            "counter", "Pages brought back to the device", _by_tier(moves.fetched_pages), "tier"
        ),
        "kv_fallbacks_total": Metric(
            "counter",
            "Moves that failed, or that were no longer worth waiting for",
            {"failed": moves.failed_moves, "slow": moves.slow_moves},
            "reason",
        ),
    }


def _rates(kv: KVManager) -> dict[str, Metric]:
    rates, tiers = kv.rates, [shelf.tier for shelf in kv.mover.shelves]
    ways = [way for tier in tiers for way in ((Tier.DEVICE, tier), (tier, Tier.DEVICE))]
    return {
        "kv_prefill_tokens_per_second": Metric(
            "gauge", "Measured rate of computing KV", rates.prefill_tokens_per_s() or 0
        ),
        "kv_move_bytes_per_second": Metric(
            "gauge",
            "Measured rate of moving KV",
            {f"{a.value}-{b.value}": rates.bytes_per_s(a, b) or 0 for a, b in ways},
            "way",
        ),
    }


def _by_tier(pages: dict[Tier, int]) -> dict[str, float]:
    return {tier.value: count for tier, count in dict(pages).items()}
