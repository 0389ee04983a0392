"""Which dimension of an array lies along which axis of a device mesh, by name.

Parameters name their dimensions (`kv_heads`, `mlp`, `vocab`); a rule table says which mesh axis
each name is split over. Usable without the rest of jaxserve.
"""

from sharding_rules.rules import MEGATRON, Rules, named_sharding

__all__ = ["MEGATRON", "Rules", "named_sharding"]
