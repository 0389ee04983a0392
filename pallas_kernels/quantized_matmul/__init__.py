"""Matmuls of quantized weights with unquantized activations."""

from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.formats import (
    FP8,
    GGUF,
    Format,
    QuantizedWeight,
    abstract_weight,
    dequantize,
    from_gguf,
    quantize,
)

__all__ = [
    "FP8",
    "GGUF",
    "Format",
    "QuantizedWeight",
    "abstract_weight",
    "dequantize",
    "from_gguf",
    "quantize",
    "quantized_matmul",
]
