"""What the engine asks of a model. Knows tensors; knows no request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hybridserve.core.cache_spec import CacheSpec
    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.layers.context import ForwardContext
    from hybridserve.layers.weights import ModelWeights


class CausalLM(ABC):
    """A decoder. Built from (config.json as a dict, BuildContext); loaded by `models.weights`.

    No torch module: weights belong to formats, and a step pays for every layer of calls.
    """

    vocab_size: int
    max_position_embeddings: int | None
    """Longest sequence that the checkpoint was made for; None where there is no limit (pure state models)."""
    cache_specs: list[CacheSpec]
    """What its layers remember, in the order of `ForwardContext.caches`."""
    weights: ModelWeights
    """What it expects of a checkpoint, and how large it is."""

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """input_ids [T] int64 -> final (normalized) hidden states [T, hidden]."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """hidden [R, hidden], and which of these rows use which adapter -> logits [R, vocab_size] in
        float32."""

    def __call__(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self.forward(input_ids, context)
