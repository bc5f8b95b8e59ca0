"""Low-rank adapters, many in a batch."""

from hybridserve.kernels.lora.native import Native
from hybridserve.kernels.lora.reference import Reference
from hybridserve.kernels.lora.torch_native import TorchNative
from hybridserve.kernels.lora.triton_backend import Triton

BACKENDS = (Native, Triton, TorchNative, Reference)
"""Most preferred first."""
