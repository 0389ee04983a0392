"""Metrics of the KV manager: pages per tier, eviction and preemption counts, transfer rates."""

from __future__ import annotations

from jaxserve.kv.manager import KVManager, TierUsage
from jaxserve.kv.tier import Tier
from jaxserve.metrics.metric import Metric


def kv_metrics(kv: KVManager, max_model_len: int) -> dict[str, Metric]:
    """Metrics by exported name. Transfers are in the event log, from which `Metrics` derives its
    own."""
    metrics = _pages(kv) | _counters(kv) | _rates(kv)
    return _vllm_metrics(kv, max_model_len) | {
        f"jaxserve:{name}": metric for name, metric in metrics.items()
    }


def _vllm_metrics(kv: KVManager, max_model_len: int) -> dict[str, Metric]:
    pool, host = kv.pool, kv.tiers.get(Tier.HOST)
    size_tokens = pool.capacity * pool.page_size
    config = {
        "block_size": pool.page_size,
        "num_gpu_blocks": pool.capacity,
        "num_cpu_blocks": host.num_pages if host else 0,
        "enable_prefix_caching": kv.prefix_caching,
        "kv_cache_size_tokens": size_tokens,
        "kv_cache_max_concurrency": round(size_tokens / max_model_len, 2),
    }
    return {
        "vllm:kv_cache_usage_perc": Metric(
            "gauge", "Share of the KV pages that sequences use, 0..1", pool.num_used / pool.capacity
        ),
        "vllm:cache_config_info": Metric(
            "info",
            "Sizes of the KV cache: tokens a page, device pages, host pages, tokens in all, and "
            "sequences at the context limit",
            {name: str(value) for name, value in config.items()},
        ),
    }


def _pages(kv: KVManager) -> dict[str, Metric]:
    pool, tiers = kv.pool, kv.tiers
    if kv.host_pages is not None:
        tiers[Tier.HOST] = TierUsage(kv.host_pages.num_used, kv.host_limits.num_pages)
    device = {"free": pool.num_free, "used": pool.num_used, "cached": pool.num_cached}
    return {
        "kv_pages": Metric(
            "gauge",
            "Device pages: free, used by sequences, or cached and evictable",
            device,
            "state",
        ),
        "kv_offload_pages": Metric(
            "gauge",
            "Pages in use on each tier below the device",
            {tier.value: usage.num_used for tier, usage in tiers.items()},
            "tier",
        ),
        "kv_offload_capacity_pages": Metric(
            "gauge",
            "Capacity in pages of each tier below the device",
            {tier.value: usage.num_pages for tier, usage in tiers.items()},
            "tier",
        ),
        "kv_nodes": Metric("gauge", "Nodes (pages of tokens) in the prefix tree", len(kv.tree)),
        "kv_transfers_in_flight": Metric(
            "gauge", "Transfers between tiers in flight", kv.num_in_flight_transfers
        ),
    }


def _counters(kv: KVManager) -> dict[str, Metric]:
    counters, transfers = kv.counters, kv.transfer_counters
    return {
        "kv_copied_pages_total": Metric("counter", "Pages copied on write", counters.copied_pages),
        "kv_evicted_pages_total": Metric(
            "counter", "Cached device pages evicted", counters.evicted_pages
        ),
        "kv_lost_pages_total": Metric(
            "counter",
            "Pages evicted without a copy on another tier",
            counters.lost_pages + transfers.lost_pages,
        ),
        "kv_preemptions_total": Metric(
            "counter",
            "Preempted sequences, by swap or recompute",
            {"swap": counters.swaps, "recompute": counters.recomputes},
            "kind",
        ),
        "kv_saved_pages_total": Metric(
            "counter", "Pages saved to a lower tier", _by_tier(transfers.saved_pages), "tier"
        ),
        "kv_fetched_pages_total": Metric(
            "counter", "Pages fetched to the device", _by_tier(transfers.fetched_pages), "tier"
        ),
        "kv_fallbacks_total": Metric(
            "counter",
            "Transfers that failed or took too long",
            {"failed": transfers.failed_transfers, "slow": transfers.slow_transfers},
            "reason",
        ),
    }


def _rates(kv: KVManager) -> dict[str, Metric]:
    rates = kv.rates
    directions = [(Tier.DEVICE, tier) for tier in kv.tiers]
    directions += [(tier, Tier.DEVICE) for tier in kv.tiers]
    return {
        "kv_prefill_tokens_per_second": Metric(
            "gauge", "Measured prefill rate", rates.prefill_tokens_per_s() or 0
        ),
        "kv_transfer_bytes_per_second": Metric(
            "gauge",
            "Measured KV transfer rate",
            {f"{a.value}-{b.value}": rates.bytes_per_s(a, b) or 0 for a, b in directions},
            "direction",
        ),
    }


def _by_tier(pages: dict[Tier, int]) -> dict[str, float]:
    return {tier.value: count for tier, count in dict(pages).items()}
