"""Attention over pages on TPUs, and writes to pages, in Mosaic TPU."""
