"""Small random models whose states matter, saved as checkpoints, and a way to run them without an engine.

With an ordinary random init a recurrent state fades within a few tokens, and then a test of states passes
falsely. Here a step keeps 95 to 99.5 % of a state, activations are of order one, and mixers are loud.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hybridserve.core.cache_spec import PagedKVSpec
from hybridserve.distributed.pipeline import PipelineStage
from hybridserve.distributed.tp import TPGroup
from hybridserve.kernels.attention.interface import AttentionBackend, AttentionMetadata
from hybridserve.kernels.attention.reference import Reference as ReferenceAttention
from hybridserve.kernels.gemm.reference import Reference as ReferenceGemm
from hybridserve.kernels.moe.reference import Reference as ReferenceMoE
from hybridserve.kernels.pointwise.reference import Reference as ReferencePointwise
from hybridserve.kernels.registry import Capabilities
from hybridserve.kernels.ssm.interface import SSMBackend, SSMMetadata
from hybridserve.kernels.ssm.reference import Reference as ReferenceSSM
from hybridserve.layers.context import BuildContext, CacheView, ForwardContext
from hybridserve.lora.batch import make_batch, rows_with_adapters
from hybridserve.models.weights import load_model
from hybridserve.quant.policy import Quantization
from hybridserve.quant.registry import make_policy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hybridserve.kernels.gemm.interface import GemmBackend
    from hybridserve.kernels.moe.interface import MoEBackend
    from hybridserve.kernels.pointwise.interface import PointwiseBackend
    from hybridserve.layers.lora import LoraRegistry
    from hybridserve.models.base import CausalLM


COMMON = {"vocab_size": 512, "hidden_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ATTENTION = {
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FAMILIES = {
    "jamba": {
        **COMMON,
        **ATTENTION,
        "num_hidden_layers": 8,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
    },
    "bamba": {
        **COMMON,
        **ATTENTION,
        "num_hidden_layers": 5,
        "attn_layer_indices": [1, 3],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 4,
    },
    "mamba": {**COMMON, "num_hidden_layers": 4, "state_size": 16, "time_step_rank": 8},
    "llama": {**COMMON, **ATTENTION, "num_hidden_layers": 4},
    "mistral": {**COMMON, **ATTENTION, "num_hidden_layers": 4, "sliding_window": 8},
    "qwen2": {**COMMON, **ATTENTION, "num_hidden_layers": 4},
}
"""Family -> the config of its small model; "jamba" is the T-model, "bamba" its sibling
T-mamba2."""


def save_model(
    family: str,
    path: Path,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> torch.nn.Module:
    """Make a model, save it into `path` with transformers, and return transformers' model, ready to be an
    oracle."""
    import transformers

    name = family.capitalize()
    config = getattr(transformers, f"{name}Config")(**{**FAMILIES[family], **overrides})
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    randomize(model, seed)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter of a transformers model a value that matters."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(shape: torch.Size, low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    for name, parameter in model.named_parameters():
        shape = parameter.shape
        if name.endswith("A_log"):
            value = uniform(shape, 0.5, 1.0).log()
        elif name.endswith(("dt_proj.bias", "dt_bias")):
            value = torch.expm1(uniform(shape, 0.012, 0.04)).log()  # softplus of it is what is drawn
        elif name.endswith("dt_proj.weight"):
            value = 0.1 * torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        elif "norm" in name or name.endswith(".D"):
            value = uniform(shape, 0.7, 1.3)
        elif name.endswith("bias"):
            value = 0.2 * torch.randn(shape, generator=generator)
        elif "conv1d" in name:
            value = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        elif "embed" in name:
            value = 0.3 * torch.randn(shape, generator=generator)
        else:
            loud = 3.0 if "out_proj" in name else 1.0
            value = loud * torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        parameter.copy_(value)
    for module in model.modules():
        if hasattr(module, "dt_bias"):  # Mamba-2: what dt_proj is to Mamba, the last rows of in_proj are here
            module.in_proj.weight[-len(module.dt_bias) :] *= 0.1


@dataclass(frozen=True)
class Backends:
    """One backend an operator; the plain definitions unless told."""

    attention: AttentionBackend = field(default_factory=ReferenceAttention)
    ssm: SSMBackend = field(default_factory=ReferenceSSM)
    gemm: GemmBackend = field(default_factory=ReferenceGemm)
    moe: MoEBackend = field(default_factory=ReferenceMoE)
    pointwise: PointwiseBackend = field(default_factory=ReferencePointwise)

    def context(
        self,
        dtype: torch.dtype = torch.float32,
        tp: TPGroup | None = None,
        *,
        device: str = "cpu",
        cache_dtype: str | None = None,
        max_model_len: int | None = None,
        lora: LoraRegistry | None = None,
        quantization: Quantization | None = None,
        pipeline: PipelineStage | None = None,
        expert_parallel: bool = False,
    ) -> BuildContext:
        return BuildContext(
            dtype=dtype,
            device=torch.device(device),
            tp=tp or TPGroup.single(),
            formats=make_policy(
                quantization or Quantization(),
                self.gemm,
                self.moe,
                Capabilities(device, str(dtype).removeprefix("torch.")),
            ),
            attention=self.attention,
            ssm=self.ssm,
            moe=self.moe,
            pointwise=self.pointwise,
            cache_dtype=cache_dtype or str(dtype).removeprefix("torch."),
            state_dtype="float32",
            max_model_len=max_model_len,
            lora=lora,
            pipeline=pipeline or PipelineStage.single(),
            expert_parallel=expert_parallel,
        )


@dataclass
class Held:
    """What one sequence holds in a `Runner`."""

    slot: int
    block_ids: list[int]
    num_computed: int = 0
    adapter_slot: int = 0
    adapter_start: int = 0


class Runner:
    """Runs a model over caches of its own: steps over any sequences, logits at every position."""

    def __init__(
        self,
        model: CausalLM,
        backends: Backends,
        *,
        num_sequences: int = 4,
        blocks_each: int = 32,
        block_size: int = 4,
        poison: float = float("nan"),
    ) -> None:
        self.model = model
        self.backends = backends
        self.block_size = block_size
        self.caches = [
            _cache(spec, 1 + num_sequences * blocks_each, 1 + num_sequences, block_size, poison)
            for spec in model.cache_specs
        ]
        self.sequences = [
            Held(1 + i, list(range(1 + i * blocks_each, 1 + (i + 1) * blocks_each)))
            for i in range(num_sequences)
        ]

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[int, Sequence[int]]], position_offset: int = 0) -> list[torch.Tensor]:
        """`work`: (sequence index, its next tokens). Returns the logits [tokens, vocab] of each; nothing on
        ranks that have none."""
        tokens = [torch.tensor(ids) for _, ids in work]
        lens = [len(ids) for ids in tokens]
        sequences = [self.sequences[index] for index, _ in work]
        before = [sequence.num_computed for sequence in sequences]
        places = [torch.arange(start, start + length) for start, length in zip(before, lens, strict=True)]
        tables = torch.tensor([sequence.block_ids for sequence in sequences])
        mapping = [
            table[place // self.block_size] * self.block_size + place % self.block_size
            for table, place in zip(tables, places, strict=True)
        ]
        starts = torch.tensor([0, *lens]).cumsum(0)
        attention = AttentionMetadata(
            query_start=starts,
            seq_lens=torch.tensor(before) + torch.tensor(lens),
            block_table=tables,
            slot_mapping=torch.cat(mapping),
            query_lens=lens,
            context_lens=before,
        )
        ssm = SSMMetadata(
            query_start=starts,
            state_slots=torch.tensor([sequence.slot for sequence in sequences]),
            has_state=torch.tensor([start > 0 for start in before]),
            query_lens=lens,
        )
        context = ForwardContext(
            positions=torch.cat(places) + position_offset,
            attention=self.backends.attention.prepare(attention),
            ssm=self.backends.ssm.prepare(ssm),
            caches=self.caches,
            lora=make_batch(
                rows_with_adapters(
                    np.array([sequence.adapter_slot for sequence in sequences]),
                    np.array([sequence.adapter_start for sequence in sequences]),
                    starts.numpy(),
                    torch.cat(places).numpy(),
                ),
                torch.from_numpy,
            ),
        )
        hidden = self.model(torch.cat(tokens), context)
        for sequence, length in zip(sequences, lens, strict=True):
            sequence.num_computed += length
        logits = None if hidden is None else self.model.logits(hidden, context.lora)
        return [] if logits is None else list(logits.split(lens))

    def run(self, ids: Sequence[int], chunk: int | None = None, sequence: int = 0) -> torch.Tensor:
        """All of a sequence, in chunks: logits [tokens, vocab]."""
        chunk = chunk or len(ids)
        parts = [self.step([(sequence, ids[i : i + chunk])]) for i in range(0, len(ids), chunk)]
        return torch.cat([logits for part in parts for logits in part] or [torch.empty(0)])

    def states(self, sequence: int = 0) -> list[tuple[torch.Tensor, ...]]:
        """The state tensors of each recurrent layer, in order."""
        slot = self.sequences[sequence].slot
        return [tuple(t[slot] for t in cache) for cache in self.caches if isinstance(cache, tuple)]


def load_runner(path: Path, backends: Backends | None = None, **options) -> Runner:
    """Load a checkpoint with this project's loader; `options` as for `Backends.context`."""
    backends = backends or Backends()
    return Runner(load_model(path, backends.context(**options)), backends)


def _cache(spec, num_blocks: int, num_slots: int, block_size: int, poison: float) -> CacheView:
    if isinstance(spec, PagedKVSpec):
        shape = (num_blocks, 2, block_size, spec.num_kv_heads, spec.head_dim)
        return torch.full(shape, poison, dtype=getattr(torch, spec.dtype))
    return tuple(
        torch.full((num_slots, *t.shape), poison, dtype=getattr(torch, t.dtype)) for t in spec.tensors
    )


@torch.no_grad()
def oracle(
    model: torch.nn.Module, ids: Sequence[int]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """transformers: logits [tokens, vocab] and the final (conv, ssm) state of each recurrent layer, one at a
    time."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor([list(ids)]), cache=cache, use_cache=True).logits[0]
    states = []
    for layer in cache.layers:
        if getattr(layer, "conv_states", None):
            # transformers keeps d_conv inputs; the oldest has no influence any more.
            states.append((layer.conv_states[0][0, :, 1:], layer.recurrent_states[0][0]))
    return logits, states


def random_ids(seed: int, length: int, vocab_size: int = 512) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
