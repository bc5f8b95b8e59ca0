"""Causal convolution, and the scans of Mamba and Mamba-2: recurrences whose state is overwritten."""

from hybridserve.kernels.ssm.native import Native
from hybridserve.kernels.ssm.reference import Reference
from hybridserve.kernels.ssm.torch_native import TorchNative

BACKENDS = (Native, TorchNative, Reference)
"""In order of preference."""
