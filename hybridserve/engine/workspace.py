"""What a rank needs beside weights and arena: an allowance that a plan sets aside, by the formulas of
docs/plan.md.

Activations are counted from the layers; the rest are round numbers, taken from engines of this kind on such
devices. Knows sizes; knows no device and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridserve.engine.graph_plan import adapter_graph_sizes, graph_sizes
from hybridserve.layers.footprint import OTHER

if TYPE_CHECKING:
    from hybridserve.engine.hardware import Hardware
    from hybridserve.layers.footprint import Footprint

MIB = 2**20

RUNTIME_BYTES = 768 * MIB
"""A CUDA context, and what its libraries keep."""

GRAPH_BYTES = 32 * MIB
"""Of one batch size that is recorded, for all lengths, beside the activations, which all of them share."""

GROUP_BYTES = 512 * MIB
"""Channels and buffers of the communicators of one rank."""

LOGIT_COPIES = 2
"""Of the float32 logits: themselves, and what sampling makes of them."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes of one rank."""

    runtime: int
    activations: int
    graphs: int
    collectives: int

    @property
    def total(self) -> int:
        return self.runtime + self.activations + self.graphs + self.collectives


def plan_workspace(
    footprint: Footprint,
    hardware: Hardware,
    *,
    ranks: int,
    num_tokens: int,
    num_seqs: int,
    vocab_size: int,
    element_bytes: int,
    has_adapters: bool,
) -> Workspace:
    """Of a rank whose steps have up to `num_tokens` tokens of `num_seqs` sequences."""
    widths = dict(footprint.activations)
    width = widths.pop(OTHER, 0) + max(widths.values(), default=0)
    activations = num_tokens * width * element_bytes
    if footprint.gathered:
        activations += num_seqs * vocab_size * (element_bytes + 4 * LOGIT_COPIES)
    if hardware.device == "cpu":
        return Workspace(0, activations, 0, 0)
    # what is reduced lies in a buffer that the others can reach, and its sum in another
    reduced = num_tokens * max(footprint.reductions, default=0) * element_bytes
    collectives = GROUP_BYTES + 2 * reduced if ranks > 1 else 0
    num_sizes = len(graph_sizes(num_seqs)) + has_adapters * len(adapter_graph_sizes(num_seqs))
    return Workspace(RUNTIME_BYTES, activations, num_sizes * GRAPH_BYTES, collectives)
