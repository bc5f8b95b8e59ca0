"""Mixture of experts: routing, and SwiGLU projections grouped by expert."""

from hybridserve.kernels.moe.native import Native, NativeExact
from hybridserve.kernels.moe.reference import Reference
from hybridserve.kernels.moe.torch_native import TorchNative
from hybridserve.kernels.moe.triton_backend import Triton

BACKENDS = (Native, NativeExact, Triton, TorchNative, Reference)
"""In order of preference."""
