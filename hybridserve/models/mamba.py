"""Mamba (arXiv 2312.00752) as transformers saves it: recurrent layers only, so sequences have no longest
length."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from hybridserve.layers.embedding import LMHead, VocabParallelEmbedding
from hybridserve.layers.mamba1 import MambaMixer
from hybridserve.layers.norm import RMSNorm
from hybridserve.models.base import CausalLM, Stage
from hybridserve.models.config import FamilyConfig, Size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.layers.context import BuildContext, ForwardContext


class MambaConfig(FamilyConfig):
    """Defaults are those of transformers' MambaConfig."""

    state_size: Size = 16
    layer_norm_epsilon: float = Field(1e-5, gt=0)
    expand: Size = 2
    conv_kernel: int = Field(4, ge=2)
    use_bias: bool = False
    use_conv_bias: bool = True
    residual_in_fp32: bool = True
    time_step_rank: Size | Literal["auto"] = "auto"
    tie_word_embeddings: bool = True

    @property
    def dt_rank(self) -> int:
        return math.ceil(self.hidden_size / 16) if self.time_step_rank == "auto" else self.time_step_rank


class MambaLayer:
    """A mixer behind a norm, added to what came in; the sum may be kept more precisely than the rest."""

    def __init__(self, config: MambaConfig, context: BuildContext, index: int) -> None:
        name = f"backbone.layers.{index}"
        self.dtype = context.dtype
        self.norm = RMSNorm(context, f"{name}.norm", config.hidden_size, config.layer_norm_epsilon)
        self.mixer = MambaMixer(
            context,
            f"{name}.mixer",
            hidden_size=config.hidden_size,
            inner_size=config.expand * config.hidden_size,
            state_size=config.state_size,
            conv_width=config.conv_kernel,
            dt_rank=config.dt_rank,
            conv_bias=config.use_conv_bias,
            proj_bias=config.use_bias,
        )

    def __call__(self, residual: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self.mixer(self.norm(residual.to(self.dtype)), context) + residual


class MambaForCausalLM(CausalLM):
    def __init__(self, config: Mapping[str, Any], context: BuildContext) -> None:
        parsed = MambaConfig.parse(config)
        vocab_size, hidden_size, tied = parsed.vocab_size, parsed.hidden_size, parsed.tie_word_embeddings
        self.vocab_size = vocab_size
        self.max_position_embeddings = None
        self.dtype = context.dtype
        self.residual_dtype = torch.float32 if parsed.residual_in_fp32 else context.dtype
        self.stage = Stage(
            context,
            parsed.num_hidden_layers,
            hidden_size,
            layers="backbone.layers",
            embedding="backbone.embeddings",
            head=("backbone.norm_f", "lm_head"),
            tied=tied,
            dtype=self.residual_dtype,
        )
        if self.stage.has_embedding:
            self.embeddings = VocabParallelEmbedding(
                context,
                "backbone.embeddings",
                vocab_size,
                hidden_size,
                tied=tied,
                aliases=("backbone.embedding",),
            )
        else:
            context.weights.skip("backbone.embedding")
        self.layers = [MambaLayer(parsed, context, index) for index in self.stage.layers]
        if self.stage.is_last:
            self.norm_f = RMSNorm(
                context, "backbone.norm_f", hidden_size, parsed.layer_norm_epsilon, dtype=self.residual_dtype
            )
            self.lm_head = LMHead(
                context, "lm_head", vocab_size, hidden_size, tied_to=self.embeddings if tied else None
            )
        self.cache_specs = context.cache_specs
        self.weights = context.weights

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor | None:
        if self.stage.is_first:
            residual = self.embeddings(input_ids, context.lora).to(self.residual_dtype)
        else:
            residual = self.stage.receive(len(input_ids))
        for layer in self.layers:
            residual = layer(residual, context)
        if self.stage.is_last:
            return self.norm_f(residual).to(self.dtype)
        self.stage.send(residual)
        return None

    def logits(self, hidden: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor | None:
        return self.lm_head(hidden, lora)
