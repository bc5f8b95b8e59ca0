"""What one rank's share of a model takes: bytes of weights, the widest activations, and what it reduces.

Layers fill it while they are built, each under the name of its part, so a plan counts what will be allocated,
not what a formula says. Knows sizes; knows no device and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

OTHER = "other"
"""The part of what belongs to no larger one: norms and routers."""


class WeightKind(NamedTuple):
    """Weights that are counted together."""

    part: str
    """Such as "experts", "attention" or "embeddings": what people call it."""
    format: str
    """Of quantized ones the format's name, of others the dtype."""
    active: float
    """Share that one token reads: top k of E for experts, 0 for an input embedding."""


@dataclass(slots=True)
class Footprint:
    """Of the rank that the layers were built for.

    weights: bytes of each kind.
    activations: by part, the elements a token that its widest layer keeps at the same time.
    reductions: elements a token of every all-reduce of a step, in the order of the layers.
    gathered: logits a sampled token that this rank gives to the gather; 0 where it computes none.
    """

    weights: dict[WeightKind, int] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)
    reductions: list[int] = field(default_factory=list)
    gathered: int = 0

    def add_weights(self, kind: WeightKind, num_bytes: int) -> None:
        self.weights[kind] = self.weights.get(kind, 0) + num_bytes

    def widen(self, part: str, num_elements: int) -> None:
        """A layer of `part` keeps so many elements a token at its peak."""
        self.activations[part] = max(self.activations.get(part, 0), num_elements)
