"""How fast a deployment can decode at most, and how fast it probably will: a projection, never a
measurement.

A step of `batch` sequences reads the weights that their tokens use and all their KV entries, and reads and
writes their states; docs/plan.md has the formulas, and how they compare with others. Knows bytes and speeds;
knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hybridserve.engine.hardware import Hardware
    from hybridserve.layers.footprint import WeightKind

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

CONTEXT_TOKENS = 2048
"""Of each sequence, where nothing else is said."""

MEMORY_SHARE = 0.75
"""Of its bandwidth that decoding reaches on real devices."""

COMPUTE_SHARE = 0.60
"""Of its operations a second that large products reach."""

HOP_SECONDS = 25e-6
HOP_BANDWIDTH = 25e9
"""From one stage of a pipeline to the next, bytes/s: half of what a 400 Gb/s network carries."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one rank of a pipeline stage holds and does; sizes are that rank's."""

    weights: Mapping[WeightKind, int]  # bytes
    active_parameters: float  # read a token, of all ranks of the stage together
    kv_bytes: float  # a token
    state_bytes: int  # a sequence
    reductions: Sequence[int]  # elements a token of each all-reduce
    gathered: int  # logits a sequence
    element_bytes: int  # of an activation

    def bytes_moved(self, batch: int, context: int) -> float:
        """Between the memory and the cores of this rank, in one decode step."""
        weights = sum(size * share_read(kind.active, batch) for kind, size in self.weights.items())
        return weights + batch * (context * self.kv_bytes + 2 * self.state_bytes)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step of `batch` sequences, of which each has `context` tokens."""

    batch: int
    context: int
    bytes_moved: float
    """By all ranks together."""
    roofline_seconds: float
    """At full bandwidth, collectives and arithmetic for nothing."""
    projected_seconds: float

    @property
    def roofline(self) -> float:
        """Tokens a second."""
        return self.batch / self.roofline_seconds

    @property
    def projected(self) -> float:
        """Tokens a second."""
        return self.batch / self.projected_seconds


def share_read(active: float, batch: int) -> float:
    """Of weights of which one token reads the share `active`: of E experts, k a token, a batch reads
    E (1 - (1 - k / E)^batch) different ones where the router spreads evenly."""
    return 1 - (1 - active) ** batch


def decode_step(
    stages: Sequence[StageCost],
    hardware: Hardware,
    *,
    batch: int,
    context: int,
    ranks: int,
) -> DecodeStep:
    """With `ranks` in each stage. Stages work one after the other: one step is in flight at a time."""
    # CPU ranks are processes of one machine, which has one memory
    speed = 1 / (ranks * len(stages)) if hardware.device == "cpu" else 1.0
    bandwidth, flops = hardware.bandwidth * speed, hardware.flops * speed
    total = roofline = projected = 0.0
    for stage in stages:
        moved = stage.bytes_moved(batch, context)
        operations = 2 * stage.active_parameters / ranks * batch
        total += moved * ranks
        roofline += moved / bandwidth
        projected += max(moved / (MEMORY_SHARE * bandwidth), operations / (COMPUTE_SHARE * flops))
        if ranks > 1:
            sizes = [width * stage.element_bytes * batch for width in stage.reductions]
            projected += sum(_all_reduce_seconds(size, ranks, hardware) for size in sizes)
            if stage.gathered:
                gathered = stage.gathered * stage.element_bytes * batch * (ranks - 1)
                projected += max(hardware.link_latency, gathered / hardware.link_bandwidth)
    for stage in stages[:-1]:  # hidden states go on to the next; nothing that is reduced is wider
        hidden = max(stage.reductions, default=0) * stage.element_bytes * batch
        projected += max(HOP_SECONDS, hidden / HOP_BANDWIDTH)
    return DecodeStep(batch, context, total, roofline, projected)


def _all_reduce_seconds(num_bytes: float, ranks: int, hardware: Hardware) -> float:
    return max(hardware.link_latency, 2 * (ranks - 1) / ranks * num_bytes / hardware.link_bandwidth)
