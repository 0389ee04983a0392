"""Context-parallel attention: sequences split over the ranks of a mesh axis."""

from pallas_kernels.ring_attention.api import Scheme, ring_attention, ring_paged_attention
from pallas_kernels.ring_attention.choice import choose_scheme
from pallas_kernels.ring_attention.kvp import kvp_attention, kvp_partial, kvp_slots
from pallas_kernels.ring_attention.layout import Layout, contiguous, round_robin, zigzag
from pallas_kernels.ring_attention.work import Work, pairs

__all__ = [
    "Layout",
    "Scheme",
    "Work",
    "choose_scheme",
    "contiguous",
    "kvp_attention",
    "kvp_partial",
    "kvp_slots",
    "pairs",
    "ring_attention",
    "ring_paged_attention",
    "round_robin",
    "zigzag",
]
