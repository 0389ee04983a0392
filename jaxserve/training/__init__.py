"""Trains heads that draft for a model: targets by the engine, flax, optax, grain and orbax."""
