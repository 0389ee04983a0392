"""Attention over paged key/value memory, and moves of its pages, usable without jaxserve.

One folder an operation: `reference.py` says what is meant, `xla.py` runs anywhere, `api.py` is the
one signature that callers use. A file named for a compiler, such as `mosaic_gpu_decode.py`, holds a
kernel for the chips that it compiles for.
"""
