"""Everything that depends on the version of JAX, apart for GPUs, which need absl-py, and TPUs."""
