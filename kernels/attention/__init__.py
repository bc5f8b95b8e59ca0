"""Attention over a paged cache."""

from hybridserve.kernels.attention.native import Native
from hybridserve.kernels.attention.reference import Reference
from hybridserve.kernels.attention.torch_native import TorchNative

BACKENDS = (Native, TorchNative, Reference)
"""Most preferred first."""
