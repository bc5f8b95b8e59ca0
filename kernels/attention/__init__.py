"""Attention over a paged cache."""

from hybridserve.kernels.attention.flash_attn import FlashAttn
from hybridserve.kernels.attention.flashinfer import FlashInfer
from hybridserve.kernels.attention.native import Native
from hybridserve.kernels.attention.reference import Reference
from hybridserve.kernels.attention.torch_native import TorchNative
from hybridserve.kernels.attention.triton_backend import Triton

BACKENDS = (Native, Triton, FlashAttn, FlashInfer, TorchNative, Reference)
"""Most preferred first."""
