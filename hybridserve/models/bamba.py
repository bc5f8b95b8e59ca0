"""Bamba (huggingface.co/blog/bamba): Mamba-2 layers with an attention layer in between now and then, each
followed by a gated MLP. Attention rotates half of each head.

`time_step_limit` holds for every token. (transformers does not apply it to single ones, so its results depend
on how a sequence is cut.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from hybridserve.layers.attention import Attention
from hybridserve.layers.embedding import LMHead, VocabParallelEmbedding
from hybridserve.layers.mamba2 import Mamba2Mixer
from hybridserve.layers.mlp import GatedMLP
from hybridserve.layers.norm import RMSNorm
from hybridserve.layers.rotary import RopeScaling, RotaryEmbedding
from hybridserve.models.base import CausalLM, Stage
from hybridserve.models.config import FamilyConfig, Size

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.layers.context import BuildContext, ForwardContext
    from hybridserve.layers.rotary import Rotation

UNLIMITED = (0.0, math.inf)

ROTARY_FACTOR = 0.5
"""Share of a head that is rotated, unless rope_parameters says otherwise; what stands beside it does not
count."""


class BambaConfig(FamilyConfig):
    """Defaults are those of transformers' BambaConfig."""

    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = None
    max_position_embeddings: Size = 262144
    rms_norm_eps: float = Field(1e-5, gt=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attn_layer_indices: list[int] | None = None
    mamba_n_heads: Size = 128
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_n_groups: Size = 1
    mamba_d_state: Size = 256
    mamba_d_conv: int = Field(4, ge=2)
    mamba_expand: Size = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] = UNLIMITED

    @field_validator("time_step_limit", mode="before")
    @classmethod
    def _read_limits(cls, value: object) -> object:
        """JSON has no infinity: transformers writes {"__float__": "Infinity"}, or the bare word."""
        if value is None:
            return UNLIMITED
        if not isinstance(value, list | tuple):
            return value
        return tuple(math.inf if each == {"__float__": "Infinity"} else each for each in value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        inner_size = self.mamba_expand * self.hidden_size
        if self.mamba_head_dim * self.mamba_n_heads != inner_size:
            raise ValueError(
                f"mamba_n_heads: {self.mamba_n_heads} heads of mamba_d_head ({self.mamba_d_head}) are not "
                f"mamba_expand x hidden_size ({inner_size})"
            )
        if self.mamba_n_heads % self.mamba_n_groups:
            raise ValueError(f"mamba_n_groups: {self.mamba_n_groups} groups of {self.mamba_n_heads} heads")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size: {self.hidden_size} is no multiple of num_attention_heads")
        for index in self.attn_layer_indices or ():
            if not 0 <= index < self.num_hidden_layers:
                raise ValueError(f"attn_layer_indices: there is no layer {index} of {self.num_hidden_layers}")
        least, most = self.time_step_limit
        if not 0 <= least <= most:
            raise ValueError(f"time_step_limit: {least:g} to {most:g}")
        return self

    @property
    def mamba_head_dim(self) -> int:
        automatic = self.mamba_expand * self.hidden_size // self.mamba_n_heads
        return automatic if self.mamba_d_head == "auto" else self.mamba_d_head

    @property
    def attention_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def is_attention(self, layer: int) -> bool:
        return layer in (self.attn_layer_indices or ())


class BambaLayer:
    """A mixer and a feed-forward block, each behind a norm and added to what came in."""

    def __init__(self, config: BambaConfig, context: BuildContext, index: int) -> None:
        name = f"model.layers.{index}"
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(context, f"{name}.input_layernorm", hidden_size, eps)
        self.self_attn = _attention(config, context, name) if config.is_attention(index) else None
        self.mamba = _mamba(config, context, name) if self.self_attn is None else None
        self.pre_ff_layernorm = RMSNorm(context, f"{name}.pre_ff_layernorm", hidden_size, eps)
        self.feed_forward = GatedMLP(
            context, f"{name}.feed_forward", hidden_size, config.intermediate_size, bias=config.mlp_bias
        )

    def __call__(self, hidden: torch.Tensor, context: ForwardContext, rotation: Rotation) -> torch.Tensor:
        normed = self.input_layernorm(hidden)
        if self.self_attn is not None:
            mixed = self.self_attn(normed, context, rotation)
        else:
            assert self.mamba is not None
            mixed = self.mamba(normed, context)
        hidden = mixed.add_(hidden)
        return self.feed_forward(self.pre_ff_layernorm(hidden), context.lora).add_(hidden)


def _attention(config: BambaConfig, context: BuildContext, name: str) -> Attention:
    return Attention(
        context,
        f"{name}.self_attn",
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.attention_head_dim,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def _mamba(config: BambaConfig, context: BuildContext, name: str) -> Mamba2Mixer:
    return Mamba2Mixer(
        context,
        f"{name}.mamba",
        hidden_size=config.hidden_size,
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_head_dim,
        num_groups=config.mamba_n_groups,
        state_size=config.mamba_d_state,
        conv_width=config.mamba_d_conv,
        conv_bias=config.mamba_conv_bias,
        proj_bias=config.mamba_proj_bias,
        norm_eps=config.rms_norm_eps,
        dt_limits=config.time_step_limit,
    )


class BambaForCausalLM(CausalLM):
    def __init__(self, config: Mapping[str, Any], context: BuildContext) -> None:
        parsed = BambaConfig.parse(config)
        vocab_size, hidden_size, tied = parsed.vocab_size, parsed.hidden_size, parsed.tie_word_embeddings
        longest = parsed.max_position_embeddings
        scaling = RopeScaling.from_config(
            {**config, "partial_rotary_factor": ROTARY_FACTOR},
            parsed.attention_head_dim,
            longest,
            context.max_model_len or longest,
        )
        self.vocab_size = vocab_size
        self.max_position_embeddings = longest
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
        self.rotary = RotaryEmbedding(scaling, context.dtype, context.device)
        self.layers = [BambaLayer(parsed, context, index) for index in self.stage.layers]
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
        rotation = self.rotary(context.positions)
        for layer in self.layers:
            hidden = layer(hidden, context, rotation)
        if self.stage.is_last:
            return self.final_layernorm(hidden)
        self.stage.send(hidden)
        return None

    def logits(self, hidden: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor | None:
        return self.lm_head(hidden, lora)
