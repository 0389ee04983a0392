"""Attention over paged keys and values, moves of pages, products of packed weights, and what
several devices do of these together. Usable without jaxserve.

One folder an operation: `api.py` is the signature that callers use, `reference.py` says what is
meant, `xla.py` runs anywhere, and a file named for a compiler, such as `mosaic_tpu.py`, holds a
kernel for the chips that it compiles for. `backends` chooses, `trust` tells whether a kernel may be
chosen, and `compat` knows the versions of JAX.
"""
