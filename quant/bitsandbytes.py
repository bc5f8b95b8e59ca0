"""Weights as bitsandbytes stores them: `bnb-int8` and `bnb-nf4` (NF4: arXiv 2305.14314). For comparison and
for checkpoints' sake; the other formats are faster.

Each product first makes a plain copy of its weight, and activations are never rounded: LLM.int8() chooses the
columns that it keeps exact by looking at the whole batch, so that a request's result depends on others.
Knows how such weights are cut; numbers become codes, and codes numbers, in the package (extra `quant`).
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from hybridserve.kernels.gemm.interface import INT8_MAX, ScaledWeight
from hybridserve.kernels.moe.interface import ExpertGroups
from hybridserve.quant.format import part_of
from hybridserve.quant.scaled import ScaledFormat

if TYPE_CHECKING:
    from hybridserve.kernels.moe.interface import ExpertDelta
    from hybridserve.kernels.registry import Capabilities
    from hybridserve.quant.format import Weights

BLOCK = 64
"""Elements of a row that share a scale in NF4."""


class BnbFormat(ScaledFormat):
    """Codes and scales as `ScaledFormat` has them; what differs is that a product dequantizes."""

    depends_on_threads: ClassVar[bool] = True
    can_be_recorded: ClassVar[bool] = False  # which experts are used is asked of the device

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        if importlib.util.find_spec("bitsandbytes") is None:
            return "bitsandbytes is not installed: pip install 'hybridserve[quant]'"
        return None

    def note(self, *, projections: bool, experts: bool) -> str:
        return "each product dequantizes its whole weight first; activations as they are"

    @abstractmethod
    def dense(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The plain weight [out, in]."""

    def finish_linear(self, weights: Weights) -> None:
        pass

    def apply_linear(self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None) -> torch.Tensor:
        return self.gemm.linear(x, self.dense(weights["codes"], weights["scales"], x.dtype), bias)

    def dequantize_linear(self, weights: Weights) -> torch.Tensor:
        return self.dense(weights["codes"], weights["scales"], torch.float32)

    def finish_experts(self, weights: Weights) -> None:
        pass

    def apply_experts(
        self,
        x: torch.Tensor,
        weights: Weights,
        routing_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        delta: ExpertDelta | None = None,
    ) -> torch.Tensor:
        """Only the experts that some token uses are dequantized."""
        used, ids = torch.unique(expert_ids, return_inverse=True)
        if len(used) == 0:
            return torch.empty_like(x)
        gate_up, down = (
            torch.stack([self.dense(codes[e], scales[e], x.dtype) for e in used.tolist()])
            for codes, scales in (
                (weights[f"{name}.codes"], weights[f"{name}.scales"]) for name in ("gate_up", "down")
            )
        )
        renumbered = None if delta is None else _Renumbered(delta, used)
        return self.moe.experts(x, routing_weights, ids, gate_up, down, renumbered)

    def dequantize_expert(self, weights: Weights, expert: int, part: str) -> torch.Tensor:
        codes, scales = (
            part_of(weights[f"gate_up.{kind}"][expert], weights[f"down.{kind}"][expert], part)
            for kind in ("codes", "scales")
        )
        return self.dense(codes, scales, torch.float32)


class BnbInt8Format(BnbFormat):
    name: ClassVar[str] = "bnb-int8"
    code_dtype: ClassVar[torch.dtype] = torch.int8

    @classmethod
    def quantize_rows(cls, weight: torch.Tensor) -> ScaledWeight:
        import bitsandbytes  # noqa: F401 - registers the operators

        codes, largest, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight.float(), 0.0)
        return ScaledWeight(codes, largest / INT8_MAX)

    def dense(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        dense: torch.Tensor = torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales * INT8_MAX)
        return dense.to(dtype)


class BnbNf4Format(BnbFormat):
    """Two codes a byte, [out, in / 2], and a scale for each 64 of a row, [out, in / 64]."""

    name: ClassVar[str] = "bnb-nf4"
    code_dtype: ClassVar[torch.dtype] = torch.uint8
    inputs_together: ClassVar[int] = BLOCK

    @classmethod
    def quantize_rows(cls, weight: torch.Tensor) -> ScaledWeight:
        import bitsandbytes  # noqa: F401

        codes, scales = torch.ops.bitsandbytes.quantize_4bit(weight.float(), BLOCK, "nf4", torch.uint8)
        num_rows = len(weight)
        return ScaledWeight(codes.view(num_rows, -1), scales.view(num_rows, -1))

    def dense(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        shape = (codes.shape[0], 2 * codes.shape[1])
        flat = codes.reshape(-1, 1)
        dense: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            flat, scales.reshape(-1), BLOCK, "nf4", shape, dtype
        )
        return dense

    def create_linear(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> Weights:
        num_blocks = _blocks(in_features)
        return {
            "codes": torch.empty(out_features, in_features // 2, dtype=self.code_dtype, device=device),
            "scales": torch.empty(out_features, num_blocks, dtype=torch.float32, device=device),
        }

    def create_experts(
        self, num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device
    ) -> Weights:
        weights = {}
        for name, rows, columns in (("gate_up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
            shape = (num_experts, rows)
            weights[f"{name}.codes"] = torch.empty(*shape, columns // 2, dtype=self.code_dtype, device=device)
            weights[f"{name}.scales"] = torch.empty(
                *shape, _blocks(columns), dtype=torch.float32, device=device
            )
        return weights

    def _part(self, quantized: ScaledWeight, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """A cut goes between blocks: `_blocks` has seen to it that each rank's part is whole."""
        start, stop, _ = columns.indices(2 * quantized.codes.shape[1])
        return quantized.codes[:, start // 2 : stop // 2], quantized.scales[:, start // BLOCK : stop // BLOCK]


class _Renumbered:
    """A delta whose experts are counted among the used ones."""

    def __init__(self, delta: ExpertDelta, used: torch.Tensor) -> None:
        self.delta = delta
        self.used = used

    def add_gate_up(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self.delta.add_gate_up(y, x, self._whole(groups))

    def add_down(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self.delta.add_down(y, x, self._whole(groups))

    def _whole(self, groups: ExpertGroups) -> ExpertGroups:
        return ExpertGroups(groups.tokens, self.used[groups.experts])


def _blocks(num_inputs: int) -> int:
    """ValueError where blocks would go over the end of a row, and their codes depend on how it is cut."""
    if num_inputs % BLOCK:
        raise ValueError(
            f"quantization.targets: {BnbNf4Format.name} needs a multiple of {BLOCK} inputs, and one of the "
            f"targets has {num_inputs}"
        )
    return num_inputs // BLOCK
