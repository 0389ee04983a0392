"""Which tokens lie on which pages, and in which tier: the tree of cached prefixes."""
