"""Dense projections of unquantized weights."""

from hybridserve.kernels.gemm.reference import Reference
from hybridserve.kernels.gemm.torch_native import TorchNative

BACKENDS = (TorchNative, Reference)
"""In order of preference."""
