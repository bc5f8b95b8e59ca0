"""Jamba (arXiv 2403.19887): Mamba layers with an attention layer in between now and then, and a mixture of
experts in every other feed-forward block. No positional encoding: the recurrent layers know where they are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from hybridserve.layers.attention import Attention
from hybridserve.layers.embedding import LMHead, VocabParallelEmbedding
from hybridserve.layers.mamba1 import MambaMixer
from hybridserve.layers.mlp import GatedMLP
from hybridserve.layers.moe import SparseMoE
from hybridserve.layers.norm import RMSNorm
from hybridserve.models.base import CausalLM, Stage
from hybridserve.models.config import FamilyConfig, Size

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.layers.context import BuildContext, ForwardContext


class JambaConfig(FamilyConfig):
    """Defaults are those of transformers' JambaConfig."""

    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = None
    attention_bias: Literal[False] = False
    sliding_window: None = None
    max_position_embeddings: Size = 262144
    rms_norm_eps: float = Field(1e-6, gt=0)
    tie_word_embeddings: bool = False
    num_experts: Size = 16
    num_experts_per_tok: Size = 2
    expert_layer_period: Size = 2
    expert_layer_offset: int = Field(1, ge=0)
    attn_layer_period: Size = 8
    attn_layer_offset: int = Field(4, ge=0)
    mamba_d_state: Size = 16
    mamba_d_conv: int = Field(4, ge=2)
    mamba_expand: Size = 2
    mamba_dt_rank: Size | Literal["auto"] = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        for kind in ("attn", "expert"):
            offset, period = getattr(self, f"{kind}_layer_offset"), getattr(self, f"{kind}_layer_period")
            if offset >= period:
                raise ValueError(
                    f"{kind}_layer_offset: {offset} must be below {kind}_layer_period ({period})"
                )
        if self.num_experts_per_tok > self.num_experts > 1:
            raise ValueError(f"num_experts_per_tok: {self.num_experts_per_tok} of {self.num_experts} experts")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size: {self.hidden_size} is no multiple of num_attention_heads")
        return self

    @property
    def dt_rank(self) -> int:
        return math.ceil(self.hidden_size / 16) if self.mamba_dt_rank == "auto" else self.mamba_dt_rank

    def is_attention(self, layer: int) -> bool:
        return layer % self.attn_layer_period == self.attn_layer_offset

    def is_moe(self, layer: int) -> bool:
        return self.num_experts > 1 and layer % self.expert_layer_period == self.expert_layer_offset


class JambaLayer:
    """A mixer and a feed-forward block, each behind a norm and added to what came in."""

    def __init__(self, config: JambaConfig, context: BuildContext, index: int) -> None:
        name = f"model.layers.{index}"
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(context, f"{name}.input_layernorm", hidden_size, eps)
        self.mixer = (
            _attention(config, context, name) if config.is_attention(index) else _mamba(config, context, name)
        )
        self.pre_ff_layernorm = RMSNorm(context, f"{name}.pre_ff_layernorm", hidden_size, eps)
        self.feed_forward = (
            _moe(config, context, name) if config.is_moe(index) else _mlp(config, context, name)
        )

    def __call__(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        mixed = self.mixer(self.input_layernorm(hidden), context)
        normed = self.pre_ff_layernorm.of_sum(mixed, hidden)
        return self.feed_forward(normed, context.lora).add_(mixed)


def _attention(config: JambaConfig, context: BuildContext, name: str) -> Attention:
    num_heads = config.num_attention_heads
    return Attention(
        context,
        f"{name}.self_attn",
        hidden_size=config.hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.num_key_value_heads or num_heads,
        head_dim=config.head_dim or config.hidden_size // num_heads,
    )


def _mamba(config: JambaConfig, context: BuildContext, name: str) -> MambaMixer:
    return MambaMixer(
        context,
        f"{name}.mamba",
        hidden_size=config.hidden_size,
        inner_size=config.mamba_expand * config.hidden_size,
        state_size=config.mamba_d_state,
        conv_width=config.mamba_d_conv,
        dt_rank=config.dt_rank,
        conv_bias=config.mamba_conv_bias,
        proj_bias=config.mamba_proj_bias,
        norm_eps=config.rms_norm_eps,
    )


def _moe(config: JambaConfig, context: BuildContext, name: str) -> SparseMoE:
    return SparseMoE(
        context,
        f"{name}.feed_forward",
        config.hidden_size,
        config.intermediate_size,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        renormalize=False,
    )


def _mlp(config: JambaConfig, context: BuildContext, name: str) -> GatedMLP:
    return GatedMLP(context, f"{name}.feed_forward", config.hidden_size, config.intermediate_size)


class JambaForCausalLM(CausalLM):
    def __init__(self, config: Mapping[str, Any], context: BuildContext) -> None:
        parsed = JambaConfig.parse(config)
        vocab_size, hidden_size, tied = parsed.vocab_size, parsed.hidden_size, parsed.tie_word_embeddings
        self.vocab_size = vocab_size
        self.max_position_embeddings = parsed.max_position_embeddings
        self.stage = Stage(
            context,
            parsed.num_hidden_layers,
            hidden_size,
            layers="model.layers",
            embedding="model.embed_tokens",
            head=("model.final_layernorm", "lm_head"),
            tied=tied,
        )
        if self.stage.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(
                context, "model.embed_tokens", vocab_size, hidden_size, tied=tied
            )
        self.layers = [JambaLayer(parsed, context, index) for index in self.stage.layers]
        if self.stage.is_last:
            self.final_layernorm = RMSNorm(context, "model.final_layernorm", hidden_size, parsed.rms_norm_eps)
            self.lm_head = LMHead(
                context, "lm_head", vocab_size, hidden_size, tied_to=self.embed_tokens if tied else None
            )
        self.cache_specs = context.cache_specs
        self.weights = context.weights

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor | None:
        if self.stage.is_first:
            hidden = self.embed_tokens(input_ids, context.lora)
        else:
            hidden = self.stage.receive(len(input_ids))
        for layer in self.layers:
            hidden = layer(hidden, context)
        if self.stage.is_last:
            return self.final_layernorm(hidden)
        self.stage.send(hidden)
        return None

    def logits(self, hidden: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor | None:
        return self.lm_head(hidden, lora)
