"""The key-value store of JAX's coordination service, which host 0 runs.

JAX gives it no public name: `jax.distributed` only starts it, and `multihost_utils` exchanges
values by collectives, which would wait behind the steps. So this module is the only one to know
jax._src.distributed; tests/runtime/test_coordination.py says for which versions of JAX it holds.
"""

from __future__ import annotations

import jax
from jax._src import distributed

StoreError = jax.errors.JaxRuntimeError
"""Raised by every method when the service does not answer."""


class Store:
    """Values by key, for the hosts of this job. Any thread may use it."""

    def __init__(self) -> None:
        self._client = distributed.global_state.client

    def set(self, key: str, value: bytes, *, overwrite: bool = False) -> None:
        """Raises StoreError also for a key that has a value, unless `overwrite`."""
        self._client.key_value_set_bytes(key, value, allow_overwrite=overwrite)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value. Raises TimeoutError when it is not set in time."""
        try:
            return self._client.blocking_key_value_get_bytes(key, round(timeout_s * 1000))
        except StoreError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(key) from error
            raise

    def list(self, prefix: str) -> dict[str, bytes]:
        """The values of all keys that begin with `prefix`, which ends with a slash."""
        return dict(self._client.key_value_dir_get_bytes(prefix))

    def delete(self, key: str) -> None:
        self._client.key_value_delete(key)
