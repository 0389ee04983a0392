"""Products of packed weights and unpacked activations."""

from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.formats import (
    FP8,
    GGUF,
    Format,
    PackedWeight,
    abstract_weight,
    dequantize,
    from_gguf,
    quantize,
)

__all__ = [
    "FP8",
    "GGUF",
    "Format",
    "PackedWeight",
    "abstract_weight",
    "dequantize",
    "from_gguf",
    "quantize",
    "quantized_matmul",
]
