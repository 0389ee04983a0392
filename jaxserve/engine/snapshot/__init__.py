"""Snapshots of requests and their KV: written, exported, and added to another engine."""
