"""How is a layer computed on this device? One seam, and what stands behind it."""

from engine.kernels.build import KernelsUnavailable
from engine.kernels.choice import choose_kernels
from engine.kernels.compiled_kernels import CompiledKernels
from engine.kernels.kernels import (
    INT8_GROUP,
    PACKED_ROWS,
    Int8Weight,
    Kernels,
    LinearWeight,
    PackedWeight,
)
from engine.kernels.torch_kernels import TorchKernels, dequantized

__all__ = [
    "INT8_GROUP",
    "PACKED_ROWS",
    "CompiledKernels",
    "Int8Weight",
    "Kernels",
    "KernelsUnavailable",
    "LinearWeight",
    "PackedWeight",
    "TorchKernels",
    "choose_kernels",
    "dequantized",
]
