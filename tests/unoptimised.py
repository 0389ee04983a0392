"""Compiler options for programs that take longer to compile than to run: unoptimised code is ready
about three times sooner, and means the same."""

from __future__ import annotations

import jax

UNOPTIMISED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.__version_info__ < (0, 11):  # Later ones have no other emitters.
    UNOPTIMISED["xla_cpu_use_fusion_emitters"] = False
XLA_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in UNOPTIMISED.items())
"""The same for all programs of a process."""
