"""Operators on rows: norms, activations, rotations, and what of a distribution may be drawn."""

from hybridserve.kernels.pointwise.native import Native
from hybridserve.kernels.pointwise.reference import Reference
from hybridserve.kernels.pointwise.torch_native import TorchNative
from hybridserve.kernels.pointwise.triton_backend import Triton

BACKENDS = (Native, Triton, TorchNative, Reference)
"""Most preferred first."""
