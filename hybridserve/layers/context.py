"""What layers are built from and what they are given in a forward pass.

Knows tensors, backends and this rank's share of a model; does not know requests or the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from hybridserve.distributed.pipeline import PipelineStage
from hybridserve.layers.footprint import OTHER, Footprint, WeightKind
from hybridserve.layers.weights import ModelWeights

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hybridserve.core.cache_spec import CacheSpec
    from hybridserve.distributed.tp import TPGroup
    from hybridserve.kernels.attention.interface import AttentionBackend, AttentionMetadata
    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.kernels.moe.interface import MoEBackend
    from hybridserve.kernels.pointwise.interface import PointwiseBackend
    from hybridserve.kernels.ssm.interface import SSMBackend, SSMMetadata
    from hybridserve.layers.lora import LoraRegistry
    from hybridserve.quant.format import WeightFormat
    from hybridserve.quant.policy import FormatPolicy

CacheView = torch.Tensor | tuple[torch.Tensor, ...]
"""What one remembering layer sees of the arena: a KV view [num_blocks, 2, block_size, num_kv_heads,
head_dim], or one view [num_slots, *shape] for each tensor of its StateSpec, in order."""


EXPERTS = "experts"
"""What ranks divide under expert parallelism."""


class IndivisibleError(ValueError):
    """A model can't be divided among so many tensor-parallel ranks."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """What the ranks of a tensor-parallel group divide among them: `count` of something."""

    count: int
    what: str
    shared: bool = False
    """Whether several ranks may hold the same one, where there are fewer than ranks."""

    def allows(self, size: int) -> bool:
        return self.count % size == 0 or (self.shared and size % self.count == 0)

    def rule(self) -> str:
        """What a size that isn't allowed does wrong."""
        if self.shared:
            return f"neither divides {self.count:,} {self.what} nor is a multiple of them"
        return f"doesn't divide {self.count:,} {self.what}"


@dataclass(slots=True)
class BuildContext:
    """Everything a layer needs to be constructed. Layers that remember register what they remember, layers
    with weights what they expect of a checkpoint."""

    dtype: torch.dtype
    device: torch.device
    tp: TPGroup
    formats: FormatPolicy
    attention: AttentionBackend
    ssm: SSMBackend
    moe: MoEBackend
    pointwise: PointwiseBackend
    cache_dtype: str
    state_dtype: str
    pipeline: PipelineStage = field(default_factory=PipelineStage.single)
    """Which of the model's layers are built."""
    expert_parallel: bool = False
    """Whether the ranks of `tp` divide the experts among them, not each expert."""
    dimensions: set[Dimension] = field(default_factory=set)
    """All that the layers divide among the ranks of `tp`."""
    cache_specs: list[CacheSpec] = field(default_factory=list)
    max_model_len: int | None = None
    """Longest sequence that will be served; None: the longest that the checkpoint was made for. Only scalings
    of RoPE that choose their frequencies by length (dynamic, longrope) care."""
    weights: ModelWeights = field(default_factory=ModelWeights)
    lora: LoraRegistry | None = None
    """Where layers offer their modules to adapters; None: nothing can be adapted."""
    footprint: Footprint = field(default_factory=Footprint)
    part: str = OTHER
    """Of the model, whose layers are being built: what `footprint` counts them as."""

    def register_cache(self, spec: CacheSpec) -> int:
        """Returns the index of this layer's views in `ForwardContext.caches`."""
        self.cache_specs.append(spec)
        return len(self.cache_specs) - 1

    def divide(self, count: int, what: str, *, shared: bool = False) -> None:
        """Say what a layer is about to divide among the ranks. IndivisibleError if they can't have equal
        parts."""
        dimension = Dimension(count, what, shared)
        self.dimensions.add(dimension)
        if not dimension.allows(self.tp.size):
            raise IndivisibleError(f"parallel.tensor: {self.tp.size} {dimension.rule()}")

    def divide_inputs(self, num_inputs: int, quantized: WeightFormat) -> None:
        """The same for the input axis of a weight in a format."""
        together = quantized.inputs_together
        if together > 1 and num_inputs % together == 0:
            self.divide(num_inputs // together, f"blocks of {together} inputs ({quantized.name})")

    def within(self, part: str) -> BuildContext:
        """The same context, for the layers of a part of the model, whose sizes are counted by that name."""
        return replace(self, part=part)

    def allocate(self, *shape: int, dtype: torch.dtype | None = None, active: float = 1.0) -> torch.Tensor:
        """A weight of this rank that no format manages, in the model's dtype unless told; not initialised.
        `active` is the share of it that a token reads."""
        weight = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.hold([weight], active=active)
        return weight

    def hold(
        self, weights: Iterable[torch.Tensor], quantized: WeightFormat | None = None, *, active: float = 1.0
    ) -> None:
        """Count weights that were allocated for this rank; those of a format other than the plain one by its
        name."""
        format_name = None if quantized is None or quantized is self.formats.plain else quantized.name
        for weight in weights:
            self.weights.num_bytes += weight.nbytes
            name = format_name or str(weight.dtype).removeprefix("torch.")
            self.footprint.add_weights(WeightKind(self.part, name, active), weight.nbytes)


@dataclass(slots=True)
class ForwardContext:
    """The only argument of a forward pass besides hidden states. `T` tokens of `S` sequences, end to end."""

    positions: torch.Tensor  # [T] int64
    attention: AttentionMetadata
    ssm: SSMMetadata
    caches: list[CacheView]
    lora: LoraBatch | None
    """Which rows use which adapter; None: no row uses any."""
