"""Attention over pages on Hopper GPUs, in Mosaic GPU."""
