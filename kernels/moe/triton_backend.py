"""A mixture of experts by Triton, for NVIDIA GPUs. Knows shapes and tiles; the arithmetic is in
`triton_kernels`.

Two grouped products: gate and up with their activation, and down. How many pairs an expert has is known to
the device alone: there are as many tiles as there could be, and those without pairs end at once. A token's
result depends on no other token, and on their number only through the tile, up to float32 rounding of sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from hybridserve.kernels.gemm.interface import ScaledWeight, Weight
from hybridserve.kernels.gemm.tiles import Tile, tile_for
from hybridserve.kernels.gemm.triton_backend import as_bits, operand
from hybridserve.kernels.moe.interface import ExpertGroups, MoEBackend
from hybridserve.kernels.triton_support import cdiv, obstacle, power_of_2, rows_of

if TYPE_CHECKING:
    from types import ModuleType

    from hybridserve.kernels.moe.interface import ExpertDelta
    from hybridserve.kernels.registry import Capabilities


class Grouped(NamedTuple):
    """Pairs sorted by key, on the device."""

    order: torch.Tensor  # [P] int64: the pairs
    keys: torch.Tensor  # [P] int64, ascending
    places: torch.Tensor  # [P] int64: where each pair is in `order`
    starts: torch.Tensor  # [num_keys + 1] int32


def group_pairs(kernels: ModuleType, keys: torch.Tensor, num_keys: int) -> Grouped:
    """keys [P] int64, all of them at least 0 and below `num_keys`."""
    num_pairs = len(keys)
    order, sorted_keys, places = keys.new_empty((3, num_pairs)).unbind()
    starts = keys.new_empty(num_keys + 1, dtype=torch.int32)
    block = 32
    kernels.group_pairs[(cdiv(num_pairs + num_keys + 1, block),)](
        *(keys, order, sorted_keys, places, starts, num_pairs, num_keys), BLOCK=block, BLOCK_P=128
    )
    return Grouped(order, sorted_keys, places, starts)


def num_tiles(num_pairs: int, num_keys: int, rows: int) -> int:
    """Tiles of `rows` pairs of one key each that there can be at most."""
    return min(num_pairs, num_pairs // rows + min(num_pairs, num_keys))


def expert_tile(num_pairs: int, num_experts: int, element_bytes: int) -> Tile:
    """For as many pairs as an expert has on average; many rows with two sums take half as many outputs."""
    tile = tile_for(cdiv(num_pairs, num_experts), element_bytes)
    return tile if tile.rows < 128 else tile._replace(outputs=64)


class Triton(MoEBackend):
    name = "triton"
    can_be_recorded = True

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        return obstacle(capabilities)

    def __init__(self) -> None:
        from hybridserve.kernels.gemm import triton_kernels as gemm_kernels
        from hybridserve.kernels.moe import triton_kernels
        from hybridserve.kernels.pointwise import triton_kernels as pointwise_kernels

        self._kernels = triton_kernels
        self._gemm_kernels = gemm_kernels
        self._pointwise_kernels = pointwise_kernels

    def route(
        self, logits: torch.Tensor, top_k: int, *, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = rows_of(logits)
        num_tokens, num_experts = logits.shape
        weights = logits.new_empty((num_tokens, top_k), dtype=torch.float32)
        ids = logits.new_empty((num_tokens, top_k), dtype=torch.int64)
        if num_tokens:
            self._kernels.route[(num_tokens,)](
                *(logits, weights, ids, num_experts, logits.stride(0)),
                TOP_K=top_k,
                RENORMALIZE=renormalize,
                BLOCK_E=power_of_2(num_experts),
                BLOCK_K=power_of_2(top_k),
                num_warps=1,
            )
        return weights, ids

    def pack_scaled(self, gate_up: ScaledWeight, down: ScaledWeight) -> tuple[ScaledWeight, ScaledWeight]:
        first, second = (
            w._replace(codes=w.codes.contiguous(), scales=w.scales.contiguous()) for w in (gate_up, down)
        )
        return first, second

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        delta: ExpertDelta | None = None,
    ) -> torch.Tensor:
        num_tokens, top_k = ids.shape
        y = x.new_empty(x.shape)
        if not num_tokens:
            return y
        num_experts, hidden, intermediate = down.shape
        num_pairs = num_tokens * top_k
        grouped = group_pairs(self._kernels, ids.contiguous().view(-1), num_experts)
        tile = expert_tile(num_pairs, num_experts, _element_bytes(x, down))
        tiles = num_tiles(num_pairs, num_experts, tile.rows)
        shape = {"BLOCK_E": power_of_2(num_experts), **tile.options}

        rows, row_scales = operand(self._gemm_kernels, x, gate_up)
        elements, scales, kind = _parts(gate_up)
        fused = delta is None
        inner = x.new_empty((num_pairs, intermediate if fused else 2 * intermediate),
                            dtype=x.dtype if fused else torch.float32)  # fmt: skip
        self._kernels.gate_up[(cdiv(intermediate, tile.outputs), tiles)](
            *(rows, row_scales, elements, scales, inner, grouped.order, grouped.starts),
            *(num_experts, intermediate, hidden, rows.stride(0), *elements.stride()[:2]),
            TOP_K=top_k,
            FUSED=fused,
            **kind,
            **shape,
        )
        activations, groups = inner, None
        if delta is not None:
            groups = ExpertGroups(grouped.order // top_k, grouped.keys)
            delta.add_gate_up(inner, x, groups)
            activations = x.new_empty(num_pairs, intermediate)
            block = min(1024, power_of_2(intermediate))
            self._pointwise_kernels.silu_and_mul[(num_pairs, cdiv(intermediate, block))](
                *(inner, activations, intermediate, inner.stride(0)), BLOCK=block
            )

        rows, row_scales = operand(self._gemm_kernels, activations, down)
        elements, scales, kind = _parts(down)
        outputs = x.new_empty(num_pairs, hidden)
        self._kernels.down[(cdiv(hidden, tile.outputs), tiles)](
            *(rows, row_scales, elements, scales, outputs, grouped.starts),
            *(num_experts, hidden, intermediate, *elements.stride()[:2]),
            **kind,
            **shape,
        )
        if delta is not None and groups is not None:
            delta.add_down(outputs, activations, groups)
        block = min(1024, power_of_2(hidden))
        self._kernels.combine[(num_tokens, cdiv(hidden, block))](
            *(outputs, weights.contiguous(), grouped.places, y, hidden), TOP_K=top_k, BLOCK=block
        )
        return y


def _element_bytes(x: torch.Tensor, weight: Weight) -> int:
    return 1 if isinstance(weight, ScaledWeight) and weight.int8_rows else x.element_size()


def _parts(weight: Weight) -> tuple[torch.Tensor, torch.Tensor, dict[str, bool]]:
    """Elements whose innermost axis has no gaps, scales, and what kind they are."""
    if not isinstance(weight, ScaledWeight):
        elements = rows_of(weight)
        return elements, elements, {"SCALED": False, "INT8_ROWS": False, "FP8": False}
    codes = rows_of(as_bits(weight.codes))
    kind = {"SCALED": True, "INT8_ROWS": weight.int8_rows, "FP8": codes.dtype == torch.uint8}
    return codes, weight.scales.contiguous(), kind
