"""Paged attention, page copies, quantized matmuls, and their multi-device forms. Usable without
jaxserve.

One folder per operation: `api.py` is the public signature, `reference.py` defines the semantics,
`xla.py` runs anywhere, and a file named after a compiler, such as `mosaic_tpu.py`, holds the kernel
for the chips it compiles for; paged attention has a folder for each kind of chip. `backends`
selects the implementation, `self_check` decides whether a kernel can be trusted on a device, and
`compat` handles JAX versions.
"""
