"""Multi-host jobs: join JAX's distributed runtime, and launch the hosts' processes."""
