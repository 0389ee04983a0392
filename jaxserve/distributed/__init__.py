"""Several hosts as one: joining JAX's distributed runtime, and starting the hosts' processes."""
