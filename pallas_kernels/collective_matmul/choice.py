"""Whether to overlap products with communication.

n ranks hold t tokens each. With C FLOP/s, B bytes/s of memory and W bytes/s of a link,

    product(t) = max(2 out in t / C, weight bytes / B)
    hop        = latency + message bytes / W
    plain      = product(n t) + (n - 1) hop
    ring       = product(t) + (n - 1) max(product(t), hop)

since collectives too are n - 1 hops. A ring pays where a product hides a hop, product(t) >= hop,
and where splitting costs less than it hides, n product(t) < product(n t) + (n - 1) hop.

For many tokens, product is proportional to t: the second condition always holds and the first
decides. For few, as in decode, a product takes as long as reading the weight: the second condition
becomes product(t) < hop, which contradicts the first, so no ring pays.
"""

from __future__ import annotations

from typing import NamedTuple


class CollectiveRates(NamedTuple):
    """Measured rates of the devices.

    flops_per_s: of such products, on one device.
    memory_bytes_per_s: of one device, reading.
    link_bytes_per_s: from one device to its neighbour, one way.
    hop_latency_us: of an empty message, launch included.
    both_ways: whether a device has a separate link to each of its two neighbours, as along an axis
        of a TPU's torus, and not one link for all, as at a switch between GPUs.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    hop_latency_us: float
    both_ways: bool


def worth_it(
    rates: CollectiveRates,
    *,
    ranks: int,
    tokens: int,
    weight_shape: tuple[int, int],
    weight_bytes: int,
    message_bytes: int,
) -> bool:
    """Whether a ring of products is faster than one product before or after a collective.

    tokens: of one rank. weight_shape: [out, in] of one rank's weight, which has `weight_bytes`.
    message_bytes: bytes a rank sends in each hop; half of it each way with links both ways.
    """
    num_outputs, num_inputs = weight_shape

    def product_s(tokens):
        flops = 2 * num_outputs * num_inputs * tokens
        return max(flops / rates.flops_per_s, weight_bytes / rates.memory_bytes_per_s)

    sent_bytes = message_bytes / (2 if rates.both_ways else 1)
    hop_s = rates.hop_latency_us / 1e6 + sent_bytes / rates.link_bytes_per_s
    hidden_s = (ranks - 1) * hop_s
    part_s = product_s(tokens)
    return part_s >= hop_s and ranks * part_s < product_s(ranks * tokens) + hidden_s
