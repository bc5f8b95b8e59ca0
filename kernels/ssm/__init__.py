"""Causal convolution, and the scans of Mamba and Mamba-2: recurrences whose state is overwritten."""

from hybridserve.kernels.ssm.causal_conv1d import CausalConv1d
from hybridserve.kernels.ssm.mamba_ssm import MambaSSM
from hybridserve.kernels.ssm.native import Native
from hybridserve.kernels.ssm.reference import Reference
from hybridserve.kernels.ssm.torch_native import TorchNative
from hybridserve.kernels.ssm.triton_backend import Triton

BACKENDS = (Native, Triton, MambaSSM, CausalConv1d, TorchNative, Reference)
"""In order of preference."""
