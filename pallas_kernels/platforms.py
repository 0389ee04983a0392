"""Implementations by platform, of which a program has the one of the platform that it is for."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax

_NAMED_ALIKE = ("cpu", "tpu")
"""Platforms that JAX's devices and its lowering give the same name."""
_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


@contextlib.contextmanager
def lowering_for(sharding: jax.sharding.Sharding) -> Iterator[None]:
    """Context manager in which what is traced is lowered for the devices of `sharding` alone."""
    token = _platform.set(_platform_of(sharding))
    try:
        yield
    finally:
        _platform.reset(token)


def _platform_of(sharding: jax.sharding.Sharding) -> str | None:
    """The platform of its devices; None of abstract ones, and of GPUs, which have several names."""
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return None
    platform = next(iter(sharding.device_set)).platform
    return platform if platform in _NAMED_ALIKE else None


def by_platform(
    *arguments: Any, default: Callable[..., Any], **implementations: Callable[..., Any]
) -> Any:
    """What the implementation of the platform, or `default`, returns for the arguments: as
    lax.platform_dependent, which traces all of them. Here only one is, within `lowering_for`."""
    platform = _platform.get()
    if platform is None:
        return lax.platform_dependent(*arguments, default=default, **implementations)
    return implementations.get(platform, default)(*arguments)
