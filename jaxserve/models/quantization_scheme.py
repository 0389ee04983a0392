"""How the linear layers of a quantized checkpoint are stored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.quantized_matmul import FP8, Format
from pallas_kernels.quantized_matmul.formats import INT4_BLOCK

Storage = Literal["fp8", "int8", "packed", "awq", "gptq"]
"""Which tensors a weight is stored in (loading/quantized/tensors.py)."""

ModuleFilter = Callable[[str], bool]
"""Whether the name of a module is meant."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the weight [out, in] of a linear layer is stored: (value - zero point) * scale.

    bits: of a value.
    symmetric: zero points are all in the middle of the values' range; floats have none.
    group_size: consecutive inputs that share a scale; None for all.
    rows: outputs that share a scale; None for all.
    reordered: inputs name their group themselves (`g_idx`), which activation order makes. Groups
        are as large as otherwise.
    zeros_less_one: zero points are stored less one, modulo 2^bits.
    scale_names: the last parts of the names that the tensor of scales may have.
    """

    storage: Storage
    bits: int
    symmetric: bool = True
    group_size: int | None = None
    rows: int | None = 1
    reordered: bool = False
    zeros_less_one: bool = False
    scale_names: tuple[str, ...] = ("weight_scale",)

    def format(self, num_inputs: int) -> Format | None:
        """The format that has every value of such a weight exactly; None if no format has.

        Scales of two bytes are assumed where there are zero points: their product is a minimum,
        which float32 holds. Scales are float32 whatever the file has, so that memory is known from
        `config.json` alone.
        """
        if self.storage == "fp8":
            if self.group_size is None:
                return FP8
            # Groups are the same in all rows, and may be smaller than blocks.
            format = Format("float8_e4m3fn", math.gcd(self.group_size, num_inputs))
            return format if has_few_scales(format) else None
        unit = INT4_BLOCK if self.bits == 4 else 1
        if (self.group_size or unit) % unit or num_inputs % (self.group_size or unit):
            return None
        return Format(
            "int4" if self.bits == 4 else "int8",
            self.group_size,
            minimum=not self.symmetric,
            ordered=self.reordered and self.group_size is not None,
        )


def has_few_scales(format: Format) -> bool:
    """Whether scales add at most two bits to a value; more would be a fourth of float8's memory."""
    least = 4 * jnp.dtype(format.scale_dtype).itemsize
    return format.group_size is None or format.group_size >= least


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """A parsed `quantization_config`.

    method: its `quant_method`.
    schemes: how the modules with names that `targets` match are stored; the first counts.
    ignored: matches the names of modules that are stored unquantized.
    """

    method: str
    schemes: tuple[tuple[ModuleFilter, Scheme], ...]
    ignored: ModuleFilter

    def scheme(self, module: str) -> Scheme | None:
        """How the weight of a linear layer is stored, by the name of its module; None if it is not
        quantized."""
        if module.endswith("embed_tokens") or self.ignored(module):
            return None
        return next((scheme for targets, scheme in self.schemes if targets(module)), None)
