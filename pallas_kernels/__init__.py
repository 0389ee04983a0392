"""Attention over paged key/value memory, usable without the rest of jaxserve.

One folder an operation: `reference.py` says what is meant, `xla.py` runs anywhere, `api.py` is the
one signature that callers use.
"""
