"""Dense projections."""

from hybridserve.kernels.gemm.native import Native, NativeExact
from hybridserve.kernels.gemm.onednn import OneDNN
from hybridserve.kernels.gemm.reference import Reference
from hybridserve.kernels.gemm.torch_native import TorchNative
from hybridserve.kernels.gemm.triton_backend import Triton

BACKENDS = (OneDNN, Native, NativeExact, Triton, TorchNative, Reference)
"""In order of preference."""
