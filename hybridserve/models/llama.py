"""Llama and its close kin, Mistral and Qwen2: attention with rotary embeddings and a gated MLP.

What tells them apart is said once, in how each reads its config: which projections have biases, which layers
a window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from hybridserve.layers.attention import Attention
from hybridserve.layers.embedding import LMHead, VocabParallelEmbedding
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


class LlamaConfig(FamilyConfig):
    """Defaults are those of transformers' LlamaConfig."""

    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size = 2048
    rms_norm_eps: float = Field(1e-6, gt=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size: {self.hidden_size} is no multiple of num_attention_heads")
        return self

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def out_bias(self) -> bool:
        return self.attention_bias

    def window(self, layer: int) -> int | None:
        """How many of the newest tokens a layer attends to; None: all."""
        return None


class MistralConfig(LlamaConfig):
    """Defaults are those of transformers' MistralConfig: a window in all layers, unless it is null."""

    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 4096 * 32
    sliding_window: Size | None = 4096
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    layer_types: None = None

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class Qwen2Config(LlamaConfig):
    """Defaults of transformers' Qwen2Config: q, k and v have biases, upper layers may have windows."""

    num_key_value_heads: Size | None = 32
    max_position_embeddings: Size = 32768
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: int = Field(28, ge=0)
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    mlp_bias: Literal[False] = False

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.layer_types is None:
            return self
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types: {len(self.layer_types)} for {self.num_hidden_layers} layers")
        if "sliding_attention" in self.layer_types and not (self.use_sliding_window and self.sliding_window):
            raise ValueError("layer_types: sliding_attention without use_sliding_window and a sliding_window")
        return self

    @property
    def qkv_bias(self) -> bool:
        return True

    @property
    def out_bias(self) -> bool:
        return False

    def window(self, layer: int) -> int | None:
        if not self.use_sliding_window:
            return None
        if self.layer_types is not None:
            return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None
        return self.sliding_window if layer >= self.max_window_layers else None


class LlamaLayer:
    """Attention and a gated MLP, each behind a norm and added to what came in."""

    def __init__(self, config: LlamaConfig, context: BuildContext, index: int, head_dim: int) -> None:
        name = f"model.layers.{index}"
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(context, f"{name}.input_layernorm", hidden_size, eps)
        self.self_attn = Attention(
            context,
            f"{name}.self_attn",
            hidden_size=hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=head_dim,
            window=config.window(index),
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
        )
        self.post_attention_layernorm = RMSNorm(context, f"{name}.post_attention_layernorm", hidden_size, eps)
        self.mlp = GatedMLP(
            context, f"{name}.mlp", hidden_size, config.intermediate_size, bias=config.mlp_bias
        )

    def __call__(self, hidden: torch.Tensor, context: ForwardContext, rotation: Rotation) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), context, rotation)
        normed = self.post_attention_layernorm.of_sum(attended, hidden)
        return self.mlp(normed, context.lora).add_(attended)


class LlamaForCausalLM(CausalLM):
    config_class: ClassVar[type[LlamaConfig]] = LlamaConfig

    def __init__(self, config: Mapping[str, Any], context: BuildContext) -> None:
        parsed = self.config_class.parse(config)
        vocab_size, hidden_size, tied = parsed.vocab_size, parsed.hidden_size, parsed.tie_word_embeddings
        longest = parsed.max_position_embeddings
        head_dim = parsed.head_dim or hidden_size // parsed.num_attention_heads
        scaling = RopeScaling.from_config(config, head_dim, longest, context.max_model_len or longest)
        if (partial := scaling.number("partial_rotary_factor", 1.0)) != 1:
            # transformers ignores it in these families, so it can't be told what the checkpoint was made with
            raise ValueError(f"config.json: partial_rotary_factor: {partial:g}: only 1 is supported")
        self.vocab_size = vocab_size
        self.max_position_embeddings = longest
        self.stage = Stage(
            context,
            parsed.num_hidden_layers,
            hidden_size,
            layers="model.layers",
            embedding="model.embed_tokens",
            head=("model.norm", "lm_head"),
            tied=tied,
        )
        if self.stage.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(
                context, "model.embed_tokens", vocab_size, hidden_size, tied=tied
            )
        self.rotary = RotaryEmbedding(scaling, context.dtype, context.device)
        self.layers = [LlamaLayer(parsed, context, index, head_dim) for index in self.stage.layers]
        if self.stage.is_last:
            self.norm = RMSNorm(context, "model.norm", hidden_size, parsed.rms_norm_eps)
            self.lm_head = LMHead(
                context, "lm_head", vocab_size, hidden_size, tied_to=self.embed_tokens if tied else None
            )
        self.cache_specs = context.cache_specs
        self.weights = context.weights
        self._ignore_saved_frequencies(head_dim)

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor | None:
        if self.stage.is_first:
            hidden = self.embed_tokens(input_ids, context.lora)
        else:
            hidden = self.stage.receive(len(input_ids))
        rotation = self.rotary(context.positions)
        for layer in self.layers:
            hidden = layer(hidden, context, rotation)
        if self.stage.is_last:
            return self.norm(hidden)
        self.stage.send(hidden)
        return None

    def logits(self, hidden: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor | None:
        return self.lm_head(hidden, lora)

    def _ignore_saved_frequencies(self, head_dim: int) -> None:
        """Old checkpoints hold rotary frequencies a layer; they follow from the config."""
        for index in self.stage.layers:
            name = f"model.layers.{index}.self_attn.rotary_emb.inv_freq"
            self.weights.accept(name, (head_dim // 2,), lambda _: None, covers=())


class MistralForCausalLM(LlamaForCausalLM):
    config_class = MistralConfig


class Qwen2ForCausalLM(LlamaForCausalLM):
    config_class = Qwen2Config
