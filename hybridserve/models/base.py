"""What the engine asks of a model. Knows tensors; knows no request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hybridserve.core.cache_spec import CacheSpec
    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.layers.context import BuildContext, ForwardContext
    from hybridserve.layers.weights import ModelWeights


class Stage:
    """What of a model one pipeline stage has, and how hidden states come and go.

    layers: the indices of its layers. has_embedding, has_head: whether it has what comes before the first
    layer, and what follows the last. Where the head is tied to the embedding, both ends have the embedding.
    """

    def __init__(
        self,
        context: BuildContext,
        num_layers: int,
        hidden_size: int,
        *,
        layers: str,
        embedding: str,
        head: Sequence[str],
        tied: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        """The modules of other stages are skipped when a checkpoint is loaded: `layers` is the name of what
        holds them all, `head` are those that follow the last one. `dtype`: of hidden states between layers,
        if not the model's."""
        pipeline = context.pipeline
        self.pipeline = pipeline
        self.layers = pipeline.layers(num_layers)
        self.is_first, self.is_last = pipeline.is_first, pipeline.is_last
        self.has_embedding = self.is_first or (self.is_last and tied)
        self.hidden_size = hidden_size
        self.dtype = dtype or context.dtype
        self.device = context.device
        others = (index for index in range(num_layers) if index not in self.layers)
        context.weights.skip(*(f"{layers}.{index}" for index in others))
        if not self.has_embedding:
            context.weights.skip(embedding)
        if not self.is_last:
            context.weights.skip(*head)

    def receive(self, num_tokens: int) -> torch.Tensor:
        """[T, hidden] from the stage before."""
        return self.pipeline.receive((num_tokens, self.hidden_size), self.dtype, self.device)

    def send(self, hidden: torch.Tensor) -> None:
        """[T, hidden] to the next stage."""
        self.pipeline.send(hidden)


class CausalLM(ABC):
    """A decoder, or the layers of one that a pipeline stage has. Built from (config.json as a dict,
    BuildContext); loaded by `models.weights`.

    No torch module: weights belong to formats, and a step pays for every layer of calls.
    """

    stage: Stage
    vocab_size: int
    max_position_embeddings: int | None
    """Longest sequence that the checkpoint was made for; None where there is no limit (pure state models)."""
    cache_specs: list[CacheSpec]
    """What its layers remember, in the order of `ForwardContext.caches`."""
    weights: ModelWeights
    """What it expects of a checkpoint, and how large it is."""

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor | None:
        """input_ids [T] int64 -> final (normalized) hidden states [T, hidden] where the last layer is, None
        on other stages, which send what they have to the next."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor | None:
        """hidden [R, hidden], and which of these rows use which adapter -> logits [R, vocab_size] in
        float32 on tensor-parallel rank 0, None on others. For the last stage only."""

    def __call__(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor | None:
        return self.forward(input_ids, context)
