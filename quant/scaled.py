"""Weights of one byte an element and a float32 scale an output: what `int8`, `int8-w8a8` and `fp8` share.

Knows how such weights are cut, loaded and applied; how numbers become codes is each format's own.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from hybridserve.kernels.gemm.interface import ScaledWeight
from hybridserve.quant.format import Shard, Source, WeightError, WeightFormat, Weights, part_of, settle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hybridserve.kernels.moe.interface import ExpertDelta
    from hybridserve.kernels.registry import Backend

_SLICE_ELEMENTS = 1 << 18
"""Of a tensor, quantized at once: they stay in cache, and need little memory beside it."""


class ScaledFormat(WeightFormat):
    """A projection is {"codes": [out, in], "scales": [out]}; experts are those of "gate_up" and "down", with
    an axis of experts in front."""

    code_dtype: ClassVar[torch.dtype]
    int8_rows: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def quantize_rows(cls, weight: torch.Tensor) -> ScaledWeight:
        """A plain weight [out, in] of any dtype, each row by itself. Where a row holds NaN or infinity, its
        scale does."""

    def note(self, *, projections: bool, experts: bool) -> str:
        used: dict[str, Backend] = {}
        if projections:
            used["projections"] = self.gemm
        if experts:
            used["experts"] = self.moe
        return "; ".join((self._roundings(used), *_copies(used)))

    def _roundings(self, used: Mapping[str, Backend]) -> str:
        if self.int8_rows:
            return "activations rounded to int8 a row"
        roundings = {part: backend.rounding for part, backend in used.items()}
        if len(set(roundings.values())) == 1:
            return f"activations {_as_rounded(*set(roundings.values()))}"
        parts = (f"of {part} {_as_rounded(rounding)}" for part, rounding in roundings.items())
        return f"activations {', '.join(parts)}"

    def create_linear(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> Weights:
        return {
            "codes": self.allocate(out_features, in_features, dtype=self.code_dtype, device=device),
            "scales": torch.empty(out_features, dtype=torch.float32, device=device),
        }

    def load_linear(self, weights: Weights, source: Source, shard: Shard) -> None:
        self._load(weights["codes"], weights["scales"], source, shard)

    def finish_linear(self, weights: Weights) -> None:
        codes, weights["scales"], _ = self.gemm.pack_scaled(self._linear(weights))
        weights["codes"] = settle(weights["codes"], codes)

    def apply_linear(self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None) -> torch.Tensor:
        return self.gemm.linear(x, self._linear(weights), bias)

    def dequantize_linear(self, weights: Weights) -> torch.Tensor:
        codes, scales, _ = self.gemm.unpack_scaled(self._linear(weights))
        return codes.float().mul_(scales.unsqueeze(1))

    def create_experts(
        self, num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device
    ) -> Weights:
        weights = {}
        for name, rows, columns in (("gate_up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
            shape = (num_experts, rows, columns)
            weights[f"{name}.codes"] = self.allocate(*shape, dtype=self.code_dtype, device=device)
            weights[f"{name}.scales"] = torch.empty(shape[:2], dtype=torch.float32, device=device)
        return weights

    def load_expert(self, weights: Weights, expert: int, part: str, source: Source, shard: Shard) -> None:
        codes, scales = (
            part_of(weights[f"gate_up.{kind}"][expert], weights[f"down.{kind}"][expert], part)
            for kind in ("codes", "scales")
        )
        self._load(codes, scales, source, shard)

    def finish_experts(self, weights: Weights) -> None:
        packed = self.moe.pack_scaled(*self._experts(weights))
        for name, weight in zip(("gate_up", "down"), packed, strict=True):
            weights[f"{name}.codes"], weights[f"{name}.scales"] = weight.codes, weight.scales

    def apply_experts(
        self,
        x: torch.Tensor,
        weights: Weights,
        routing_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        delta: ExpertDelta | None = None,
    ) -> torch.Tensor:
        gate_up, down = self._experts(weights)
        return self.moe.experts(x, routing_weights, expert_ids, gate_up, down, delta)

    def dequantize_expert(self, weights: Weights, expert: int, part: str) -> torch.Tensor:
        gate_up, down = (weight.part(expert, expert + 1) for weight in self._experts(weights))
        gate_up, down = (weight.expert(0) for weight in self.moe.unpack_scaled(gate_up, down))
        codes = part_of(gate_up.codes, down.codes, part)
        return codes.float().mul_(part_of(gate_up.scales, down.scales, part).unsqueeze(1))

    def _linear(self, weights: Weights) -> ScaledWeight:
        return ScaledWeight(weights["codes"], weights["scales"], self.int8_rows)

    def _experts(self, weights: Weights) -> tuple[ScaledWeight, ScaledWeight]:
        return (
            ScaledWeight(weights["gate_up.codes"], weights["gate_up.scales"], self.int8_rows),
            ScaledWeight(weights["down.codes"], weights["down.scales"], self.int8_rows),
        )

    def _load(self, codes: torch.Tensor, scales: torch.Tensor, source: Source, shard: Shard) -> None:
        """Scales are those of whole rows of the whole tensor, whichever columns this rank keeps."""
        rows, columns = shard.source
        codes, scales = codes[shard.destination], scales[shard.destination[0]]
        if isinstance(source, ScaledWeight):
            self._check_stored(source)
            codes.copy_(source.codes[rows, columns])
            scales.copy_(source.scales[rows])
            return
        if self.stored:
            raise WeightError(f"is not quantized, but the checkpoint's quantization_config says {self.name}")
        source = source[rows]
        if source.is_meta:  # an outline, to see whether it fits; its codes would be one as well
            outline = self.create_linear(len(source), source.shape[1], source.dtype, source.device)
            codes_part, scales_part = self._part(self._linear(outline), columns)
            codes.copy_(codes_part)
            scales.copy_(scales_part)
            return
        step = max(1, _SLICE_ELEMENTS // source.shape[1])
        for start in range(0, len(source), step):
            part = slice(start, start + step)
            quantized = self.quantize_rows(source[part])
            if not quantized.scales.isfinite().all():
                raise WeightError("holds NaN or infinity")
            codes[part], scales[part] = self._part(quantized, columns)

    def _part(self, quantized: ScaledWeight, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of some inputs."""
        return quantized.codes[:, columns], quantized.scales

    def _check_stored(self, source: ScaledWeight) -> None:
        if not self.stored:
            raise WeightError("is quantized, but the checkpoint has no quantization_config")
        if source.codes.dtype != self.code_dtype:
            raise WeightError(f"holds {source.codes.dtype} codes, but the checkpoint's format is {self.name}")


def _as_rounded(rounding: str) -> str:
    return f"rounded {rounding}" if rounding else "as they are"


def _copies(used: Mapping[str, Backend]) -> Iterator[str]:
    for part, backend in used.items():
        if backend.copies_codes:
            yield f"a product of {part} ({backend.name}) makes {backend.copies_codes}"


def divide_rows(weight: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [out, in] of any dtype -> quotients [out, in] and scales [out] in float32: a row's largest
    magnitude becomes `largest`. Scales are normal numbers: with others a quotient could be more."""
    wide = weight.to(torch.float32, copy=True)
    magnitudes = torch.maximum(wide.amax(1), wide.amin(1).neg_())
    scales = magnitudes.div_(largest).clamp_(min=torch.finfo(torch.float32).tiny)
    return wide.div_(scales.unsqueeze(1)), scales
