"""The plainest definition of what adapters add: one row at a time, in float32.

Knows tensors; knows no model and nothing of speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.kernels.lora.interface import LoraBackend

if TYPE_CHECKING:
    import torch

    from hybridserve.kernels.lora.interface import LoraBatch, LoraPair, LoraTable
    from hybridserve.kernels.moe.interface import ExpertGroups


class Reference(LoraBackend):
    name = "reference"

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        table: LoraTable,
        batch: LoraBatch,
        bias: torch.Tensor | None = None,
    ) -> None:
        for row, slot in enumerate(batch.row_slots.tolist()):
            for pair in table.pairs(slot):
                _add(y[row], pair.A.float() @ x[row].float(), pair, bias)

    def add_embedding(
        self, y: torch.Tensor, token_ids: torch.Tensor, table: LoraTable, batch: LoraBatch
    ) -> None:
        for row, (slot, token) in enumerate(zip(batch.row_slots.tolist(), token_ids.tolist(), strict=True)):
            for pair in table.pairs(slot):
                u = pair.A[token].float() if token >= 0 else pair.A.new_zeros(pair.A.shape[1]).float()
                _add(y[row], u, pair, None)

    def add_experts(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        x_rows: torch.Tensor | None,
        table: LoraTable,
        batch: LoraBatch,
        groups: ExpertGroups,
    ) -> None:
        slots = batch.row_slots[groups.tokens].tolist()
        sources = range(len(y)) if x_rows is None else x_rows.tolist()
        for row, (slot, expert, source) in enumerate(
            zip(slots, groups.experts.tolist(), sources, strict=True)
        ):
            for pair in table.pairs(slot, expert):
                _add(y[row], pair.A.float() @ x[source].float(), pair, None)


def _add(y: torch.Tensor, u: torch.Tensor, pair: LoraPair, base_bias: torch.Tensor | None) -> None:
    """One row y [all columns] and its rank activations u [r]."""
    columns = slice(pair.start, pair.start + pair.B.shape[1])
    base = y[columns].float()
    total = base + pair.scale * (u @ pair.B.float())
    if pair.gain is not None:
        total = total + pair.gain * (base if base_bias is None else base - base_bias[columns].float())
    if pair.bias is not None:
        total = total + pair.bias
    y[columns] = total.to(y.dtype)
