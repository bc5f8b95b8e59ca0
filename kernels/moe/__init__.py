"""Mixture of experts: routing, and SwiGLU projections grouped by expert."""

from hybridserve.kernels.moe.native import Native, NativeExact
from hybridserve.kernels.moe.reference import Reference
from hybridserve.kernels.moe.torch_native import TorchNative

BACKENDS = (Native, NativeExact, TorchNative, Reference)
"""In order of preference."""
