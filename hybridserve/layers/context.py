"""What layers are built from and what they are given in a forward pass.

Knows tensors, backends and this rank's share of a model; does not know requests or the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hybridserve.layers.weights import ModelWeights

if TYPE_CHECKING:
    from hybridserve.core.cache_spec import CacheSpec
    from hybridserve.distributed.tp import TPGroup
    from hybridserve.kernels.attention.interface import AttentionBackend, AttentionMetadata
    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.kernels.moe.interface import MoEBackend
    from hybridserve.kernels.pointwise.interface import PointwiseBackend
    from hybridserve.kernels.ssm.interface import SSMBackend, SSMMetadata
    from hybridserve.layers.lora import LoraRegistry
    from hybridserve.quant.policy import FormatPolicy

CacheView = torch.Tensor | tuple[torch.Tensor, ...]
"""What one remembering layer sees of the arena: a KV view [num_blocks, 2, block_size, num_kv_heads,
head_dim], or one view [num_slots, *shape] for each tensor of its StateSpec, in order."""


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
    cache_specs: list[CacheSpec] = field(default_factory=list)
    max_model_len: int | None = None
    """Longest sequence that will be served; None: the longest that the checkpoint was made for. Only scalings
    of RoPE that choose their frequencies by length (dynamic, longrope) care."""
    weights: ModelWeights = field(default_factory=ModelWeights)
    lora: LoraRegistry | None = None
    """Where layers offer their modules to adapters; None: nothing can be adapted."""

    def register_cache(self, spec: CacheSpec) -> int:
        """Returns the index of this layer's views in `ForwardContext.caches`."""
        self.cache_specs.append(spec)
        return len(self.cache_specs) - 1

    def allocate(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A weight of this rank that no format manages, in the model's dtype unless told; not initialised."""
        weight = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.weights.num_bytes += weight.nbytes
        return weight


@dataclass(slots=True)
class ForwardContext:
    """The only argument of a forward pass besides hidden states. `T` tokens of `S` sequences, end to end."""

    positions: torch.Tensor  # [T] int64
    attention: AttentionMetadata
    ssm: SSMMetadata
    caches: list[CacheView]
    lora: LoraBatch | None
    """Which rows use which adapter; None: no row uses any."""
