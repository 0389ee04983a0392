"""Compiler options for programs that take longer to compile than to run: unoptimised code is ready
about three times sooner, and means the same."""

from __future__ import annotations

import jax

UNOPTIMISED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.__version_info__ < (0, 11):
    # Later ones have no other emitters.
    UNOPTIMISED["xla_cpu_use_fusion_emitters"] = False
    # Compiling a tiny program in up to 32 parts, for threads, costs twice what it costs in one.
    UNOPTIMISED["xla_cpu_parallel_codegen_split_count"] = 1


def _flags(options: dict[str, bool | int]) -> str:
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())


XLA_FLAGS = _flags(UNOPTIMISED)
"""The same for all programs of a process."""
_SUMMING_ALIKE = {k: v for k, v in UNOPTIMISED.items() if k != "xla_cpu_use_fusion_emitters"}
XLA_FLAGS_OF_INTERPRETERS = _flags(_SUMMING_ALIKE)
"""With the fusions of optimised code, without which two ways of one sum round apart."""
