"""Checkpoints of what drafts for a model: heads and layers."""
