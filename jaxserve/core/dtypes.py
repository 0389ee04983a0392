"""Names of dtypes, and the one for a platform."""

from __future__ import annotations

DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_NAMES: dict[str | None, str | None] = {
    "auto": None,
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}


def full_dtype(name: str | None) -> str | None:
    """`name`, or the one of DTYPES that a short name such as bf16 stands for."""
    return _DTYPE_NAMES.get(name, name)


def default_dtype(platform: str) -> str:
    """The fastest dtype on a JAX platform: CPUs without bfloat16 units convert at every use."""
    return "float32" if platform == "cpu" else "bfloat16"
