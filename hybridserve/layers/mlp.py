"""The gated feed-forward block (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.layers.linear import ColumnParallelLinear, OutputSlice, RowParallelLinear

if TYPE_CHECKING:
    import torch

    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.layers.context import BuildContext


class GatedMLP:
    """down(silu(gate(x)) * up(x)); [T, hidden] -> [T, hidden]."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
    ) -> None:
        context = context.within("mlp")
        context.divide(intermediate_size, "inner columns of an MLP")
        self.backend = context.pointwise
        slices = [OutputSlice("gate_proj", intermediate_size), OutputSlice("up_proj", intermediate_size)]
        self.gate_up_proj = ColumnParallelLinear(context, name, slices, hidden_size, bias=bias, role="mlp")
        self.down_proj = RowParallelLinear(
            context, name, "down_proj", intermediate_size, hidden_size, bias=bias, role="mlp"
        )
        local = self.gate_up_proj.outputs.num_rows // 2
        context.footprint.widen(context.part, 3 * local)

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        return self.down_proj(self.backend.silu_and_mul(self.gate_up_proj(x, lora)), lora)
