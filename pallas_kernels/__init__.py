"""Attention over paged key/value memory, and moves of its pages, usable without jaxserve.

One folder an operation: `reference.py` says what is meant, `xla.py` runs anywhere, `api.py` is the
one signature that callers use.
"""
