"""Code that depends on the JAX version; GPUs, which need absl-py, and TPUs in separate modules."""

import jax

GPU_KERNELS_WRITE_IN_PLACE = jax.__version_info__ >= (0, 11)
"""Whether Mosaic GPU kernels take mutable references (`jax.new_ref`), to write in place."""
