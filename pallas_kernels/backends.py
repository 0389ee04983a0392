"""Which implementation of an operation runs: a Pallas kernel, or plain XLA."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import jax

from pallas_kernels import self_check

Backend = Literal["auto", "xla", "pallas"]
"""Implementation to use. "pallas": the kernel for the target device; on CPUs the TPU kernel,
interpreted. "xla": no kernel. "auto": the kernel where one exists, supports the arguments and
passed its self-check, else XLA with a warning that gives the reason; on CPUs XLA."""

HOPPER = ("H100", "H200", "H800", "H20")
"""Substrings of the names of GPUs of compute capability 9.0."""


_meant_by_auto: contextvars.ContextVar[Backend] = contextvars.ContextVar("auto", default="auto")


@contextlib.contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Context manager or decorator within which "auto" means `backend`.

    Sets the backend while tracing a whole program whose parts take no backend argument.
    """
    token = _meant_by_auto.set(backend)
    try:
        yield
    finally:
        _meant_by_auto.reset(token)


class KernelWarning(RuntimeWarning):
    """An operation fell back from a kernel to XLA; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation with one signature and several implementations.

    name: unique, as in `verified.json`.
    xla: the implementation that runs anywhere.
    kernels: platform -> module of its kernel; None where XLA is as good. A module has a function
        of the same name and arguments as `xla`, plus `interpret`, and a function `unsupported` of
        the same arguments that returns why they are refused, or None. Imported on first use.
    shapes_class, check_case: for the self-check (`self_check.CheckCase`).
    """

    name: str
    xla: Callable[..., Any]
    kernels: Mapping[str, str | None]
    shapes_class: Callable[..., str]
    check_case: Callable[..., self_check.CheckCase]

    def run(self, backend: Backend, *arguments: Any, **options: Any) -> Any:
        """Call the implementation that `choose` returns for these arguments.

        A kernel is traced once for all calls of the same shapes, such as those of unrolled layers.
        """
        implementation = self.choose(backend, *arguments, **options)
        if implementation is not self.xla:
            implementation = _jitted(implementation, tuple(options))
        return implementation(*arguments, **options)

    def choose(self, backend: Backend, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """The implementation for such arguments on the target device.

        Raises ValueError for an unknown backend, and for "pallas" where there is no kernel, where
        the kernel refuses the arguments, or where it failed its self-check.
        """
        if backend not in get_args(Backend):
            raise ValueError(f"backend is {backend!r}; it can be {', '.join(get_args(Backend))}.")
        if backend == "auto":
            backend = _meant_by_auto.get()
        platform, device_kind, is_here = target()
        if backend == "xla" or (backend == "auto" and platform == "cpu"):
            return self.xla
        kernels_of = "tpu" if platform == "cpu" else platform
        if self.kernels.get(kernels_of, "") is None:
            return self.xla
        if platform == "cpu" and kernels_of in self.kernels:
            return _interpreted(self._kernel(kernels_of))
        reason = self._refusal(platform, device_kind, arguments, options)
        if reason is None and is_here:
            shapes = self.shapes_class(*arguments, **options)
            kernel = self._kernel(platform)
            check = self_check.SelfCheck(
                platform, kernel, self.xla, self.check_case, arguments, options
            )
            reason = self_check.why_not(self.name, device_kind, shapes, check)
            if reason is not None:
                _for_now.add(self.name)
        if reason is None:
            return self._kernel(platform)
        if backend == "pallas":
            raise ValueError(f"The {platform} kernel of {self.name} cannot be used: {reason}")
        _warn_once(f"{self.name} runs in plain XLA, without the {platform} kernel: {reason}")
        return self.xla

    def supports(self, *arguments: Any, **options: Any) -> bool:
        """Whether `run` by "auto" would try a kernel of the target device for such arguments.

        For callers that prepare arguments differently for a kernel. Its self-check may still fail.
        """
        platform, device_kind, _ = target()
        if _meant_by_auto.get() == "xla" or self.kernels.get(platform) is None:
            return False
        return self._refusal(platform, device_kind, arguments, options) is None

    def _refusal(self, platform, device_kind, arguments, options) -> str | None:
        """Why there is no kernel for these arguments on that device, None if there is one."""
        if platform not in self.kernels:
            others = ", only for " + ", ".join(self.kernels) if self.kernels else ""
            return f"there is none for {platform}{others}."
        if platform == "gpu" and not any(name in device_kind for name in HOPPER):
            return f"it is for GPUs of the Hopper generation, and this is {device_kind}."
        try:
            module = importlib.import_module(self.kernels[platform])
        except (ImportError, AttributeError) as error:
            _for_now.add(self.name)
            return f"{error}; it needs a JAX of 0.10.2 to 0.12, and on GPUs absl-py."
        return module.unsupported(*arguments, **options)

    def _kernel(self, platform: str) -> Callable[..., Any]:
        module = importlib.import_module(self.kernels[platform])
        return getattr(module, self.xla.__name__)


_for_now: set[str] = set()


def fell_back_for_now() -> bool:
    """Whether any operation fell back to XLA for a reason that may not hold after a restart: a
    missing package, or a kernel that failed its self-check. Programs compiled since should not be
    cached."""
    return bool(_for_now)


def target() -> tuple[str, str, bool]:
    """Platform and kind of the target device, and whether it is present to run a self-check.

    For ahead-of-time compilation, the mesh in use names the target device.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    device = jax.config.jax_default_device
    if not isinstance(device, jax.Device):
        device = jax.devices(device)[0]
    if described is None:
        return device.platform, device.device_kind, True
    is_here = described.device_kind == device.device_kind
    return described.platform, described.device_kind, is_here


@functools.cache
def _interpreted(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(kernel, interpret=True)


@functools.cache
def _jitted(kernel: Callable[..., Any], options: tuple[str, ...]) -> Callable[..., Any]:
    return jax.jit(kernel, static_argnames=options)


@functools.cache
def _warn_once(message: str) -> None:
    # Attribute the warning to the line that called this library.
    level, frame = 1, sys._getframe()
    while frame.f_globals["__name__"].startswith("pallas_kernels") and frame.f_back:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, KernelWarning, stacklevel=level)
