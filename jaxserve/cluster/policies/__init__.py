"""Decisions of a router as pure objects, which the simulator runs too: no Ray, no JAX."""
