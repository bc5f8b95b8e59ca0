"""What a plan says: all that an engine derives from a configuration and a model, and how it is shown.

Knows numbers; how they come about is the planner's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from hybridserve.engine.plan_report import plan_table
from hybridserve.engine.roofline import BATCHES, CONTEXT_TOKENS, decode_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.engine.adapter_plan import LoraPlan
    from hybridserve.engine.graph_plan import GraphPlan
    from hybridserve.engine.hardware import Hardware
    from hybridserve.engine.host_plan import HostPlan
    from hybridserve.engine.quantization_plan import QuantizationPlan
    from hybridserve.engine.roofline import DecodeStep, StageCost
    from hybridserve.engine.workspace import Workspace


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What runs an operator, and each candidate's reason for not being it."""

    name: str
    rejected: tuple[tuple[str, str], ...]
    obstacles: tuple[tuple[str, str], ...]
    """Those of them that would have been preferred and could not be taken."""

    def text(self, *, every_reason: bool) -> str:
        reasons = self.rejected if every_reason else self.obstacles
        why = "; ".join(f"not {name}: {reason}" for name, reason in reasons)
        return f"{self.name} ({why})" if why else self.name

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "rejected": self.rejected}


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """How many ranks there are, and what they divide."""

    tensor: int = 1
    pipeline: int = 1
    expert: bool = False
    """Whether ranks divide the experts of a layer among them, not each expert."""

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    def row(self) -> tuple[str, str]:
        """For `EnginePlan.table`."""
        experts = "; each expert on one of them" if self.expert and self.tensor > 1 else ""
        tensor = f"every layer divided among {self.tensor}{experts}"
        if self.pipeline == 1:
            return "ranks", f"{self.num_ranks}, {tensor}"
        stages = f"{self.pipeline} stages of {self.tensor}"
        return "ranks", f"{self.num_ranks}: {stages}" + (f", {tensor}" if self.tensor > 1 else "")


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a pipeline, and so each of its ranks."""

    layers: tuple[int, int]
    """First and last."""
    layout: CacheLayout
    """The ids of the whole plan's layout, over what this stage remembers."""
    weight_bytes: int
    """Of its largest rank."""
    cost: StageCost
    workspace: Workspace

    @property
    def arena_bytes(self) -> int:
        return self.layout.num_slabs * self.layout.slab_bytes

    def weights_by_part(self) -> dict[str, dict[str, int]]:
        """Part of the model -> format -> bytes; the largest first."""
        parts: dict[str, dict[str, int]] = {}
        for kind, size in sorted(self.cost.weights.items(), key=lambda item: -item[1]):
            part = parts.setdefault(kind.part, {})
            part[kind.format] = part.get(kind.format, 0) + size
        return dict(sorted(parts.items(), key=lambda item: -sum(item[1].values())))

    def to_dict(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "weight_bytes_per_gpu": self.weight_bytes,
            "weights": self.weights_by_part(),
            "workspace": asdict(self.workspace),
            "arena_bytes_per_gpu": self.arena_bytes,
            "slab_bytes": self.layout.slab_bytes,
            "bytes_per_block": self.layout.bytes_per_block,
            "bytes_per_slot": self.layout.bytes_per_slot,
            "padding": round(self.layout.padding, 4),
        }


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """All that is derived from a configuration and a checkpoint's config.json. Bytes are those of one rank;
    where ranks differ, of the one that needs most."""

    model: str
    shape: str | None
    """Name of the known one that was planned, where there is no checkpoint."""
    architecture: str
    device: str
    hardware: Hardware
    is_projected: bool
    """Whether the configuration names the hardware, and not simply what is at hand is meant."""
    dtype: str
    cache_dtype: str
    state_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    parallel: ParallelPlan
    prefix_caching: bool
    checkpoint_interval: int
    """Tokens of a long prompt between two checkpoints; 0: none in between."""
    host: HostPlan
    layout: CacheLayout
    """What the scheduler goes by. With several stages its sizes are the largest of any stage."""
    stages: tuple[StagePlan, ...]
    backends: Mapping[str, BackendChoice]
    graphs: GraphPlan
    parameters_total: int
    parameters_active: int
    """Parameters read a token; the input embedding, of which one row is read, is left out."""
    weight_bytes: int
    quantization: QuantizationPlan | None
    """None: nothing is quantized."""
    lora: LoraPlan | None
    """None: the model is built without a place for adapters."""

    @property
    def arena_bytes(self) -> int:
        return self.layout.num_slabs * self.layout.slab_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layout.bytes_per_block // self.layout.block_size

    @property
    def adapter_bytes(self) -> int:
        """Set aside for adapters on each rank."""
        return 0 if self.lora is None else self.lora.max_device_bytes or 0

    def bytes_taken(self, stage: StagePlan) -> int:
        """Of the device of one rank of a stage."""
        return stage.weight_bytes + stage.workspace.total + self.adapter_bytes + stage.arena_bytes

    def kinds_of_stages(self) -> list[tuple[list[int], StagePlan]]:
        """Stages that differ in nothing but which layers they have, together: their numbers, and the first of
        them."""
        kinds: list[tuple[list[int], StagePlan]] = []
        for number, stage in enumerate(self.stages):
            for numbers, known in kinds:
                if replace(stage, layers=known.layers) == known:
                    numbers.append(number)
                    break
            else:
                kinds.append(([number], stage))
        return kinds

    def decode_step(self, batch: int, context: int = CONTEXT_TOKENS) -> DecodeStep:
        """Projected, for `batch` sequences of `context` tokens each."""
        costs = [stage.cost for stage in self.stages]
        return decode_step(costs, self.hardware, batch=batch, context=context, ranks=self.parallel.tensor)

    def fits(self, num_sequences: int, num_tokens: int) -> bool:
        """Whether so many sequences of so many tokens may run at the same time."""
        return num_sequences <= min(self.max_num_seqs, self.layout.max_sequences(num_tokens))

    def capacity(self) -> list[tuple[int, int]]:
        """(tokens a sequence, sequences that fit together) at 1K, 2K .. 256K tokens, up to
        `max_model_len`."""
        lengths = [1024 * 2**power for power in range(9) if 1024 * 2**power < self.max_model_len]
        return [(length, self.layout.max_sequences(length)) for length in [*lengths, self.max_model_len]]

    def to_dict(self) -> dict[str, Any]:
        """For `hybridserve plan --json`."""
        return {
            "model": self.model,
            "shape": self.shape,
            "architecture": self.architecture,
            "device": self.device,
            "hardware": self.hardware.name,
            "dtype": self.dtype,
            "cache_dtype": self.cache_dtype,
            "state_dtype": self.state_dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "parameters_total": self.parameters_total,
            "parameters_active": self.parameters_active,
            "weight_bytes_per_gpu": self.weight_bytes,
            "quantization": None if self.quantization is None else self.quantization.to_dict(),
            "kv_bytes_per_token_per_gpu": self.kv_bytes_per_token,
            "state_bytes_per_sequence_per_gpu": self.layout.bytes_per_slot,
            "arena_bytes_per_gpu": self.arena_bytes,
            "host_memory_per_gpu": self.host.to_dict(),
            "parallel": {
                "tensor": self.parallel.tensor,
                "pipeline": self.parallel.pipeline,
                "expert": self.parallel.expert,
            },
            "stages": [stage.to_dict() for stage in self.stages],
            "prefix_caching": self.prefix_caching,
            "checkpoint_interval": self.checkpoint_interval,
            "block_size": self.layout.block_size,
            "bytes_per_block": self.layout.bytes_per_block,
            "num_slabs": self.layout.num_slabs,
            "slab_bytes": self.layout.slab_bytes,
            "blocks_per_slab": self.layout.blocks_per_slab,
            "slots_per_slab": self.layout.slots_per_slab,
            "capacity": [{"tokens": tokens, "sequences": count} for tokens, count in self.capacity()],
            "decode": {
                "projected": True,
                "hardware": self.hardware.title,
                "context_tokens": CONTEXT_TOKENS,
                "steps": [
                    {
                        "sequences": step.batch,
                        "bytes_moved": round(step.bytes_moved),
                        "roofline_tokens_per_second": round(step.roofline, 1),
                        "projected_tokens_per_second": round(step.projected, 1),
                        "fits": self.fits(step.batch, CONTEXT_TOKENS),
                    }
                    for step in map(self.decode_step, BATCHES)
                ],
            },
            "lora": None if self.lora is None else self.lora.to_dict(),
            "backends": {op: choice.to_dict() for op, choice in self.backends.items()},
            "graphs": self.graphs.to_dict(),
        }

    def table(self, *, every_reason: bool = False) -> str:
        """The plan as the lines that an engine prints when it starts. Of the backends that were not taken it
        tells those that could not be, or every one with its reason."""
        return plan_table(self, every_reason=every_reason)
