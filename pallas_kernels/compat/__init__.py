"""Everything that depends on the version of JAX, apart for GPUs, which need absl-py, and TPUs."""

import jax

GPU_KERNELS_WRITE_IN_PLACE = jax.__version_info__ >= (0, 11)
"""Whether Mosaic GPU kernels take mutable references (`jax.new_ref`), to write in place."""
