"""Where adapters may add to a model: what its layers offer, and how they apply what is there.

Layers offer themselves while they are built; `hybridserve.lora` fills the tables. Knows names, shapes and
this rank's share; knows no adapter file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from hybridserve.kernels.lora.interface import LoraTable, Room

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hybridserve.kernels.lora.interface import LoraBackend, LoraBatch
    from hybridserve.kernels.moe.interface import ExpertGroups


class OutputPart(NamedTuple):
    """Rows `source` of a module's output axis are columns `start ..` of what this rank computes."""

    source: slice
    start: int


@dataclass(frozen=True, slots=True)
class AdaptableModule:
    """One module of the checkpoint that an adapter may change, and where this rank's share goes."""

    name: str  # as in the checkpoint: model.layers.0.mamba.in_proj, ...experts.3.gate_proj, lm_head
    kind: Literal["linear", "embedding"]
    out_features: int  # of the whole model, like in_features; of an embedding: hidden size and vocabulary
    in_features: int
    table: LoraTable
    outputs: tuple[OutputPart, ...]  # adjacent on this rank, in order
    inputs: slice  # this rank's part of the input axis
    base: Callable[[], torch.Tensor]
    """This rank's part of the base weight, dequantized [local out, local in] (DoRA needs its norms)."""
    partial: bool = False
    """Whether this rank's output is one summand of an all-reduce: a bias is then added on rank 0 only."""
    group: int = 0  # expert, among those of this rank
    stage: int = 0
    rank: int | None = None
    """Of several ranks' modules in one list: the pipeline stage that has this one, and its tensor-parallel
    rank; None: every rank of the stage has its share."""


@dataclass(slots=True)
class LoraRegistry:
    """All adaptable modules of a model, by name, filled while it is built."""

    backend: LoraBackend
    num_slots: int
    modules: dict[str, AdaptableModule] = field(default_factory=dict)
    tables: list[LoraTable] = field(default_factory=list)
    num_elsewhere: int = 0
    """Modules of these layers that only other ranks hold, and offer."""

    def create_table(self, num_groups: int = 1) -> LoraTable:
        table = LoraTable(self.num_slots, num_groups)
        self.tables.append(table)
        return table

    def reserve(self, rank: int, dtype: torch.dtype) -> None:
        """Give every table room for whatever adapters of up to this rank may add: before steps with adapters
        are recorded."""
        parts: dict[tuple[int, int], list[int]] = {}
        for module in self.modules.values():
            sizes = [part.source.stop - part.source.start for part in module.outputs]
            parts.setdefault((id(module.table), module.group), []).extend(filter(None, sizes))
        for table in self.tables:
            groups = [parts.get((id(table), group), []) for group in range(table.num_groups)]
            num_pairs, num_outputs = max(map(len, groups)), max(map(sum, groups))  # all may be one pair
            if num_pairs:
                table.room = Room(num_pairs, num_outputs, rank, dtype)

    def write(self, device: torch.device) -> None:
        """Let recorded steps find what has changed in the tables."""
        for table in self.tables:
            self.backend.write(table, device)

    def offer(self, module: AdaptableModule) -> None:
        if module.name in self.modules:
            raise ValueError(f"two layers offer the module {module.name!r} to adapters")
        self.modules[module.name] = module


@dataclass(slots=True)
class ExpertAdapters:
    """What the adapters of a step add inside one layer's experts (an `ExpertDelta` of `kernels.moe`)."""

    backend: LoraBackend
    gate_up: LoraTable
    down: LoraTable
    batch: LoraBatch

    def add_gate_up(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self.backend.add_experts(y, x, groups.tokens, self.gate_up, self.batch, groups)

    def add_down(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self.backend.add_experts(y, x, None, self.down, self.batch, groups)
