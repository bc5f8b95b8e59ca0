"""Projections by torch's matrix multiplication, for any device. Knows tensors; knows no model.

The one thing that needs care is a half-precision weight on a CPU without half-precision instructions: there
torch multiplies element by element, which is right for a row or three (the weight is read once, as it is) and
up to 10 times slower than float32 for more. Those are multiplied in float32, a slice of the weight at a time:
products of two half-precision numbers are exact in float32, and the weight is never held twice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybridserve.kernels.gemm.interface import GemmBackend

_FEW_ROWS = 3
"""Up to here reading the half-precision weight as it is beats widening it (measured on 2 cores with AVX2)."""

_SLICE_ELEMENTS = 1 << 18
"""Of a weight, widened at once: 1 MiB, which stays in cache between widening and multiplying."""


class TorchNative(GemmBackend):
    name = "torch_native"

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not widens(x, weight):
            return F.linear(x, weight, bias)
        y = widened_linear(x, weight)
        if bias is not None:
            y.add_(bias)
        return y.to(x.dtype)


def widens(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x [M, in] times weight [out, in] is faster in float32 than in the weight's dtype."""
    if x.shape[0] <= _FEW_ROWS or x.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def widened_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, in] of any dtype times a half-precision weight [out, in]; [M, out] float32, not rounded."""
    num_outputs, num_inputs = weight.shape
    x = x.float()
    y = x.new_empty(x.shape[0], num_outputs)
    step = max(1, _SLICE_ELEMENTS // num_inputs)
    buffer = x.new_empty(min(step, num_outputs), num_inputs)
    for start in range(0, num_outputs, step):
        part = weight[start : start + step]
        wide = buffer[: part.shape[0]].copy_(part)
        torch.mm(x, wide.t(), out=y[:, start : start + step])
    return y
