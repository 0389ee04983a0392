"""Trains what drafts for a model: targets by the engine, flax, optax, grain and orbax."""
