"""Matmuls of quantized weights with unquantized activations."""

from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.formats import (
    FP8,
    MXFP4,
    Format,
    QuantizedWeight,
    abstract_weight,
    dequantize,
    from_integers,
    from_mxfp4,
    quantize,
)
from pallas_kernels.quantized_matmul.gguf_blocks import GGUF, from_gguf

__all__ = [
    "FP8",
    "GGUF",
    "MXFP4",
    "Format",
    "QuantizedWeight",
    "abstract_weight",
    "dequantize",
    "from_gguf",
    "from_integers",
    "from_mxfp4",
    "quantize",
    "quantized_matmul",
]
