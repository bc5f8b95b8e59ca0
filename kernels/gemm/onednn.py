"""Projections by oneDNN with weights laid out ahead, for CPUs with half-precision instructions.

Knows tensors; knows no model.
Also the products of int8 weights and int8 rows (W8A8), where the CPU has instructions for those: without them
oneDNN adds pairs of products in 16 bits, which overflow silently. Other one-byte weights are left to native:
what of a quantized model is not quantized is still packed.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from hybridserve.kernels.gemm.interface import GemmBackend, ScaledWeight, Weight, round_rows
from hybridserve.kernels.gemm.native import Native
from hybridserve.kernels.gemm.torch_native import TorchNative

if TYPE_CHECKING:
    from hybridserve.kernels.registry import Capabilities

SCALED = ("int8", "int8-w8a8", "fp8")
"""Formats whose weights come as `ScaledWeight`."""

_ROWS = 16
"""For which the layout is chosen; it serves any number."""

_ZERO = 128
"""Rows go in as unsigned bytes, this much larger: signed ones would be multiplied by a plain loop."""


class OneDNN(GemmBackend):
    """A packed weight is opaque; one that was not packed is multiplied as it is."""

    name = "onednn"
    can_be_recorded = True
    rounding = Native.rounding

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        if capabilities.device != "cpu":
            return "runs on CPUs only"
        if capabilities.dtype != "bfloat16":
            return f"gains nothing for {capabilities.dtype}"
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "this CPU has no bfloat16 instructions"
        has_own = capabilities.weights == "int8-w8a8" and torch.cpu._is_vnni_supported()
        if capabilities.weights in SCALED and not has_own and (reason := Native.why_not(capabilities)):
            return f"leaves {capabilities.weights} weights to native, and that {reason}"
        return None

    def __init__(self) -> None:
        self._has_int8 = torch.cpu._is_vnni_supported()
        self._plain = TorchNative()

    @cached_property
    def _scaled(self) -> Native:
        """Built only for a model that has such weights."""
        return Native()

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        return packed

    def unpack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to_dense() if weight.is_mkldnn else weight

    def pack_scaled(self, weight: ScaledWeight) -> ScaledWeight:
        if not (self._has_int8 and weight.int8_rows and weight.codes.dtype == torch.int8):
            return self._scaled.pack_scaled(weight)
        return weight._replace(codes=torch.ops.onednn.qlinear_prepack(weight.codes.contiguous(), None))

    def unpack_scaled(self, weight: ScaledWeight) -> ScaledWeight:
        if not weight.codes.is_mkldnn:
            return self._scaled.unpack_scaled(weight)
        return weight._replace(codes=weight.codes.to_dense().t().contiguous())

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(weight, ScaledWeight):
            return (self._int8 if weight.codes.is_mkldnn else self._scaled.linear)(x, weight, bias)
        if not weight.is_mkldnn:
            return self._plain.linear(x, weight, bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y

    def _int8(self, x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None) -> torch.Tensor:
        rounded, row_scales = round_rows(x)
        scales = weight.scales
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rounded.add_(_ZERO).to(torch.uint8), 1.0, _ZERO),
            *(weight.codes, scales, torch.zeros_like(scales, dtype=torch.int32), None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        y.mul_(row_scales)
        if bias is not None:
            y.add_(bias)
        return y.to(x.dtype)
