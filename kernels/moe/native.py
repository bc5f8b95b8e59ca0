"""A mixture of experts in C, for CPUs: one call computes all experts. Knows tensors; knows no model.

Routing stays with torch: measured, two of its operations are quicker than one call into C with two outputs.

A token's result depends on its own row alone: the same bits with any other tokens and any number of threads.
Sums, activations and the weighted sum of experts are float32; the result is rounded once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridserve.kernels import native
from hybridserve.kernels.gemm import native as gemm
from hybridserve.kernels.gemm.interface import ScaledWeight, Weight
from hybridserve.kernels.gemm.native import CODES, KINDS, contiguous, largest, packed_row, rows_that_fit
from hybridserve.kernels.gemm.panels import DTYPES, Panels
from hybridserve.kernels.gemm.products import Products
from hybridserve.kernels.gemm.products import sources as product_sources
from hybridserve.kernels.moe.interface import ExpertGroups, MoEBackend
from hybridserve.kernels.moe.torch_native import softmax_top_k

if TYPE_CHECKING:
    from hybridserve.kernels.moe.interface import ExpertDelta
    from hybridserve.kernels.registry import Capabilities

SOURCE = Path(__file__).resolve().with_name("native.c")

FUNCTIONS = {
    "experts": (
        *(native.POINTER, native.INT, native.POINTER, native.POINTER),  # x, stride of its rows, weights, ids
        *(native.POINTER,) * 5,  # gate_up and its scales, down and its scales, y
        *(native.INT,) * 5,  # tokens, k, experts, hidden, intermediate
        *(native.INT,) * 4,  # kinds of x and weights, limit of rounded rows, whether weights are in panels
        native.POINTER,  # the product with such weights
        *(native.POINTER, native.POINTER, native.POINTER),  # numbers, inner, outputs
        *(native.POINTER, native.INT, native.INT),  # packed, its stride, rows at once
        *(native.INT, native.INT),  # stages, threads
    ),
    "panel_outputs": (native.POINTER,),
}
"""What native.c has, by the types of arguments."""

_GATE_UP, _DOWN, _COMBINE = 1, 2, 4
"""The stages of native.c."""

_SCRATCH_ELEMENTS = 1 << 22
"""Of float32 in one call at most, unless there is a delta: more tokens are computed in turns."""


class Native(MoEBackend):
    """Products with int8 codes are those of whole numbers that gemm's `Native` has: x and the activations of
    each expert are rounded row by row."""

    name = "native"
    can_be_recorded = True
    rounding = gemm.Native.rounding

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        if capabilities.device != "cpu":
            return "runs on CPUs only"
        if capabilities.dtype not in ("float32", "bfloat16"):
            return f"has no arithmetic for {capabilities.dtype}"
        return native.obstacle(*cls.sources(capabilities))

    @classmethod
    def sources(cls, capabilities: Capabilities) -> tuple[Path, ...]:
        return SOURCE, *product_sources(capabilities, rounds=bool(cls.rounding))

    def __init__(self) -> None:
        library = native.load(SOURCE, FUNCTIONS)
        self._experts = library.experts
        self._products = Products()
        self._panels = Panels.of(library)

    def route(
        self, logits: torch.Tensor, top_k: int, *, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return softmax_top_k(logits, top_k, renormalize=renormalize)

    def pack(self, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if gate_up.dtype not in DTYPES or not self._fit(down, in_pairs=False):
            return gate_up.contiguous(), down.contiguous()
        return self._panels.lay_out(gate_up, in_pairs=False), self._panels.lay_out(down, in_pairs=False)

    def unpack(self, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if down.dim() == 3:
            return gate_up, down
        return self._panels.restore(gate_up, in_pairs=False), self._panels.restore(down, in_pairs=False)

    def pack_scaled(self, gate_up: ScaledWeight, down: ScaledWeight) -> tuple[ScaledWeight, ScaledWeight]:
        gate_up, down = contiguous(gate_up), contiguous(down)
        in_pairs = self._in_pairs(down)
        if down.codes.dtype not in CODES or not self._fit(down.codes, in_pairs=in_pairs):
            return gate_up, down
        codes = [self._panels.lay_out(weight.codes, in_pairs=in_pairs) for weight in (gate_up, down)]
        return gate_up._replace(codes=codes[0]), down._replace(codes=codes[1])

    def unpack_scaled(self, gate_up: ScaledWeight, down: ScaledWeight) -> tuple[ScaledWeight, ScaledWeight]:
        if down.codes.dim() == 3:
            return gate_up, down
        in_pairs = self._in_pairs(down)
        codes = [self._panels.restore(weight.codes, in_pairs=in_pairs) for weight in (gate_up, down)]
        return gate_up._replace(codes=codes[0]), down._replace(codes=codes[1])

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        delta: ExpertDelta | None = None,
    ) -> torch.Tensor:
        num_experts, hidden, intermediate = self._shape(down)
        if not (
            self._shape(gate_up) == (num_experts, 2 * intermediate, hidden)
            and _fits(x, gate_up)
            and _fits(x, down)
            and _codes(gate_up).dim() == _codes(down).dim()
            and x.shape[1] == hidden
            and _codes(gate_up).dtype == _codes(down).dtype
            and largest(gate_up, rounds=True) == largest(down, rounds=True)
        ):
            raise ValueError(
                f"x {tuple(x.shape)} in {x.dtype}, experts {tuple(gate_up.shape)}, {tuple(down.shape)}"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        weights, ids = weights.contiguous(), ids.contiguous()
        y = x.new_empty(x.shape)
        if delta is None:
            widest = max(hidden, intermediate)
            step = max(_SCRATCH_ELEMENTS // (ids.shape[1] * (3 * widest + 2 * packed_row(widest, 0))), 1)
        else:
            step = max(len(x), 1)
        for first in range(0, len(x), step):
            some = slice(first, first + step)
            self._some(x[some], weights[some], ids[some], gate_up, down, delta, y[some])
        return y

    def _some(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        delta: ExpertDelta | None,
        y: torch.Tensor,
    ) -> None:
        num_tokens, top_k = ids.shape
        num_experts, hidden, intermediate = self._shape(down)
        num_pairs = num_tokens * top_k
        numbers = torch.empty(4 * num_pairs + num_experts + 2, dtype=torch.int64)
        inner = torch.empty(num_pairs, 2 * intermediate)
        outputs = torch.empty(num_pairs, hidden)
        limit = largest(down, rounds=bool(self.rounding))
        product = self._products.of(_codes(down).dtype, limited=limit > 0)
        packed = torch.empty(2 * num_pairs, packed_row(max(hidden, intermediate), limit))

        def run(stages: int) -> None:
            self._experts(
                *(x.data_ptr(), x.stride(0), weights.data_ptr(), ids.data_ptr()),
                *(*_pointers(gate_up), *_pointers(down), y.data_ptr()),
                *(num_tokens, top_k, num_experts, hidden, intermediate),
                *(KINDS[x.dtype], KINDS[_codes(down).dtype], limit, _codes(down).dim() == 4, product),
                *(numbers.data_ptr(), inner.data_ptr(), outputs.data_ptr()),
                *(packed.data_ptr(), packed.shape[1], rows_that_fit(packed.shape[1])),
                *(stages, torch.get_num_threads()),
            )

        if delta is None:
            run(_GATE_UP | _DOWN | _COMBINE)
            return
        run(_GATE_UP)
        groups = ExpertGroups(numbers[:num_pairs], numbers[num_pairs : 2 * num_pairs])
        delta.add_gate_up(inner, x, groups)
        run(_DOWN)
        delta.add_down(outputs, inner[:, :intermediate], groups)
        run(_COMBINE)

    def _fit(self, down: torch.Tensor, *, in_pairs: bool) -> bool:
        """Whether both weights fill panels, and gate and up each do."""
        _, hidden, intermediate = down.shape
        return self._panels.fit(hidden, intermediate, in_pairs=in_pairs) and self._panels.fit(
            intermediate, hidden, in_pairs=in_pairs
        )

    def _in_pairs(self, weight: Weight) -> bool:
        """Whether codes are multiplied with whole numbers."""
        return largest(weight, rounds=bool(self.rounding)) > 0

    def _shape(self, weight: Weight) -> tuple[int, ...]:
        """[E, out, in], packed or not."""
        codes = _codes(weight)
        return (
            tuple(codes.shape)
            if codes.dim() == 3
            else self._panels.shape_of(codes, in_pairs=self._in_pairs(weight))
        )


class NativeExact(Native):
    """The same without rounding; see gemm's."""

    name = "native_exact"
    rounding = gemm.NativeExact.rounding


def _codes(weight: Weight) -> torch.Tensor:
    return weight.codes if isinstance(weight, ScaledWeight) else weight


def _pointers(weight: Weight) -> tuple[int, int | None]:
    """Of its elements, and of their scales."""
    if isinstance(weight, ScaledWeight):
        return weight.codes.data_ptr(), weight.scales.data_ptr()
    return weight.data_ptr(), None


def _fits(x: torch.Tensor, weight: Weight) -> bool:
    """Whether the weight is whole, and of a dtype that x can be multiplied with."""
    if not _codes(weight).is_contiguous():
        return False
    if not isinstance(weight, ScaledWeight):
        return weight.dtype == x.dtype
    scales = weight.scales
    return weight.codes.dtype in CODES and scales.dtype == torch.float32 and scales.is_contiguous()
