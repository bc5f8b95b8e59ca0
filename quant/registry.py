"""The formats by name, and the policy that a quantization makes of one. Knows no layer and no checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.quant.bitsandbytes import BnbInt8Format, BnbNf4Format
from hybridserve.quant.fp8 import Fp8Format
from hybridserve.quant.int8 import Int8Format, Int8W8A8Format
from hybridserve.quant.policy import FormatPolicy, Quantization
from hybridserve.quant.unquantized import UnquantizedFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridserve.kernels.gemm.interface import GemmBackend
    from hybridserve.kernels.moe.interface import MoEBackend
    from hybridserve.kernels.registry import Capabilities
    from hybridserve.quant.format import WeightFormat

FORMATS: Mapping[str, type[WeightFormat]] = {
    kind.name: kind
    for kind in (UnquantizedFormat, Int8Format, Int8W8A8Format, BnbInt8Format, BnbNf4Format, Fp8Format)
}


def make_policy(
    quantization: Quantization, gemm: GemmBackend, moe: MoEBackend, capabilities: Capabilities
) -> FormatPolicy:
    """ValueError, with the reason, for a format that can't be used here."""
    plain = UnquantizedFormat(gemm, moe)
    if quantization.format == plain.name:
        return FormatPolicy(plain)
    kind = FORMATS[quantization.format]
    if reason := kind.why_not(capabilities):
        raise ValueError(f"quantization.format: {kind.name} can't be used here: {reason}")
    return FormatPolicy(plain, kind(gemm, moe, stored=quantization.stored), quantization)
