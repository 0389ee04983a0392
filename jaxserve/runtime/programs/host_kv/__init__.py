"""Programs for sequences longer than the pool: older KV on the host, whole or compressed."""
