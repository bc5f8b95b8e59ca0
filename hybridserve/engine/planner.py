"""Derives everything that a configuration leaves open, and says what it costs (D11). Reads no weights.

Knows models, shapes and backends; knows no request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from hybridserve.distributed.pipeline import PipelineStage
from hybridserve.distributed.tp import TPGroup
from hybridserve.engine.adapter_plan import initial_adapters, plan_lora
from hybridserve.engine.arena_plan import (
    Budget,
    available_memory,
    device_budget,
    gpu_budget,
    machine_budget,
    plan_arena,
    total_memory,
)
from hybridserve.engine.graph_plan import plan_graphs
from hybridserve.engine.hardware import Hardware, choose_hardware, engine_hardware
from hybridserve.engine.host_plan import plan_host
from hybridserve.engine.plan import BackendChoice, EnginePlan, ParallelPlan, StagePlan
from hybridserve.engine.prefix_plan import plan_checkpoint_interval
from hybridserve.engine.quantization_plan import plan_quantization
from hybridserve.engine.roofline import StageCost
from hybridserve.engine.units import size_text
from hybridserve.engine.workspace import Workspace, plan_workspace
from hybridserve.kernels import native
from hybridserve.kernels.registry import AUTO, EXACT, Backend, Capabilities, candidates, select, sources
from hybridserve.layers.context import EXPERTS, BuildContext, IndivisibleError
from hybridserve.layers.lora import LoraRegistry
from hybridserve.models.config import checkpoint_dtype, load_hf_config
from hybridserve.models.registry import build_model
from hybridserve.quant.compressed_tensors import read_config, resolve
from hybridserve.quant.policy import Quantization
from hybridserve.quant.registry import make_policy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hybridserve.config.schema import EngineConfig
    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.kernels.attention.interface import AttentionBackend
    from hybridserve.kernels.gemm.interface import GemmBackend
    from hybridserve.kernels.lora.interface import LoraBackend
    from hybridserve.kernels.moe.interface import MoEBackend
    from hybridserve.kernels.pointwise.interface import PointwiseBackend
    from hybridserve.kernels.ssm.interface import SSMBackend
    from hybridserve.layers.lora import AdaptableModule
    from hybridserve.models.base import CausalLM

__all__ = [
    "OPERATORS",
    "BackendChoice",
    "EnginePlan",
    "ParallelPlan",
    "StagePlan",
    "available_memory",
    "bare_context",
    "build_context",
    "make_plan",
    "offered_modules",
    "plan_model",
    "total_memory",
]

OPERATORS = ("attention", "ssm", "gemm", "moe", "pointwise", "lora")
"""The last one has a backend only where adapters may be loaded."""

UNLIMITED_MODEL_LEN = 1 << 20
"""`max_model_len` of a model that sets no limit of its own (pure state models)."""

MAX_TENSOR = 1024
"""Sizes of a tensor-parallel group that are thought of."""


def make_plan(config: EngineConfig, model_path: Path) -> EnginePlan:
    """Plan an engine that is about to start on this machine. ValueError, naming the key, where the
    configuration and the model or machine do not agree."""
    return plan_model(config, load_hf_config(model_path), hardware=engine_hardware(config))


def plan_model(
    config: EngineConfig,
    hf_config: Mapping[str, Any],
    *,
    shape: str | None = None,
    hardware: Hardware | None = None,
) -> EnginePlan:
    """Plan what a config.json describes, for the configuration's hardware wherever that is, unless told;
    `shape` is the name of a known one that stands in for a checkpoint. DoesNotFitError (a ValueError) where
    it has too little memory."""
    hardware = hardware or choose_hardware(config)
    here = hardware.is_here
    dtype = checkpoint_dtype(hf_config) if config.dtype == "auto" else config.dtype
    adapters = initial_adapters(config, here=here)
    has_lora = bool(adapters) or config.lora.allow_runtime_loading
    wanted = resolve(config.quantization.format, config.quantization.targets, read_config(hf_config))
    capabilities = Capabilities(
        device=hardware.device if here else "cpu",
        dtype=dtype,
        weights=wanted.format,
        block_size=config.cache.block_size,
    )
    used = [op for op in OPERATORS if op != "lora" or has_lora]
    backends = _choose_backends(config, capabilities, used) if here else _open_choices(config, used)
    cache_dtype = dtype if config.cache.dtype == "auto" else config.cache.dtype
    parallel = ParallelPlan(config.parallel.tensor, config.parallel.pipeline, config.parallel.expert)
    recipe = _Recipe(
        {op: choice.name if here else "reference" for op, choice in backends.items()},
        capabilities,
        cache_dtype,
        config.cache.state_dtype,
        config.max_model_len,
        config.lora.max_loaded,
        wanted,
        parallel.expert,
    )
    stages = _build_stages(recipe, hf_config, parallel)
    contexts = [context for context, _ in stages]
    _, model = stages[0]
    max_model_len = _max_model_len(config.max_model_len, model.max_position_embeddings)
    weight_bytes = [context.weights.num_bytes for context in contexts]
    specs = [context.cache_specs for context in contexts]
    workspaces = [_workspace(config, hardware, *stage) for stage in stages]
    if hardware.device == "cpu":
        budget = machine_budget(config, parallel.tensor * sum(weight_bytes))
    else:
        adapter_bytes = (config.lora.device_bytes or 0) if has_lora else 0
        needs = zip(weight_bytes, workspaces, strict=True)
        budget = min(_device_budget(config, hardware, *each, adapter_bytes) for each in needs)
    layout, layouts = plan_arena(config, specs, max_model_len, budget)
    graphs = plan_graphs(
        config,
        layout,
        max_model_len,
        _why_no_graphs(hardware, parallel, backends, contexts),
        config.lora.max_loaded if has_lora else 0,
        _why_not_recorded(hardware, backends, ["lora"]),
        on_cpu=hardware.device == "cpu",
    )
    costs = [_cost(context, mine) for context, mine in zip(contexts, layouts, strict=True)]
    return EnginePlan(
        model=str(config.model),
        shape=shape,
        architecture=hf_config["architectures"][0],
        device=hardware.device,
        hardware=hardware,
        is_projected=config.hardware != "auto",
        dtype=dtype,
        cache_dtype=cache_dtype,
        state_dtype=config.cache.state_dtype,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        vocab_size=model.vocab_size,
        parallel=parallel,
        prefix_caching=config.cache.prefix_caching,
        checkpoint_interval=plan_checkpoint_interval(config.cache, layout),
        host=plan_host(config, hardware, layouts, costs, parallel.tensor * sum(weight_bytes)),
        layout=layout,
        stages=tuple(
            StagePlan(
                layers=(model.stage.layers[0], model.stage.layers[-1]),
                layout=mine,
                weight_bytes=context.weights.num_bytes,
                cost=cost,
                workspace=workspace,
            )
            for (context, model), mine, cost, workspace in zip(
                stages, layouts, costs, workspaces, strict=True
            )
        ),
        backends=backends,
        graphs=graphs,
        parameters_total=sum(context.weights.num_parameters for context in contexts),
        parameters_active=round(sum(context.weights.num_active_parameters for context in contexts)),
        weight_bytes=max(weight_bytes),
        quantization=plan_quantization(contexts, here=here),
        lora=plan_lora(config, adapters, contexts, here=here),
    )


def build_context(
    plan: EnginePlan,
    device: torch.device,
    tp: TPGroup | None = None,
    pipeline: PipelineStage | None = None,
) -> BuildContext:
    """What the layers of one rank are built from, as the plan says; without groups, those of the only
    rank."""
    recipe = _recipe_of(plan)
    return recipe.context(device, tp or TPGroup.single(), pipeline or PipelineStage.single())


def offered_modules(plan: EnginePlan, hf_config: Mapping[str, Any]) -> dict[str, AdaptableModule]:
    """What all ranks together offer to adapters: without weights, for whoever reads adapters."""
    recipe, parallel = _recipe_of(plan), plan.parallel
    modules: dict[str, AdaptableModule] = {}
    num_kinds = parallel.tensor if parallel.expert else 1  # else all ranks of a stage offer the same
    for stage in range(parallel.pipeline):
        pipeline = PipelineStage(stage, parallel.pipeline)
        ranks: list[Mapping[str, AdaptableModule]] = []
        for rank in range(num_kinds):
            context, _ = _build(recipe, hf_config, TPGroup(rank, parallel.tensor), pipeline)
            ranks.append({} if context.lora is None else context.lora.modules)
        for rank, offered in enumerate(ranks):
            for name, module in offered.items():
                is_alone = any(name not in other for other in ranks)
                modules.setdefault(name, replace(module, stage=stage, rank=rank if is_alone else None))
    return modules


def bare_context(dtype: str, quantization: Quantization) -> BuildContext:
    """For a model that is only looked at: no memory, nothing to compute."""
    recipe = _Recipe(
        {op: "reference" for op in OPERATORS if op != "lora"},
        Capabilities(device="cpu", dtype=dtype),
        dtype,
        "float32",
        None,
        0,
        quantization,
    )
    return recipe.context(torch.device("meta"), TPGroup.single(), PipelineStage.single())


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What all ranks' contexts have in common."""

    chosen: Mapping[str, str]
    capabilities: Capabilities
    cache_dtype: str
    state_dtype: str
    max_model_len: int | None
    num_adapter_slots: int
    quantization: Quantization
    expert_parallel: bool = False

    def context(self, device: torch.device, tp: TPGroup, pipeline: PipelineStage) -> BuildContext:
        capabilities = self.capabilities
        backends = {op: _backend(op, name, capabilities) for op, name in self.chosen.items()}
        moe = cast("MoEBackend", backends["moe"])
        lora = None
        if "lora" in backends:
            lora = LoraRegistry(cast("LoraBackend", backends["lora"]), self.num_adapter_slots)
        return BuildContext(
            dtype=getattr(torch, capabilities.dtype),
            device=device,
            tp=tp,
            formats=make_policy(self.quantization, cast("GemmBackend", backends["gemm"]), moe, capabilities),
            attention=cast("AttentionBackend", backends["attention"]),
            ssm=cast("SSMBackend", backends["ssm"]),
            moe=moe,
            pointwise=cast("PointwiseBackend", backends["pointwise"]),
            cache_dtype=self.cache_dtype,
            state_dtype=self.state_dtype,
            pipeline=pipeline,
            expert_parallel=self.expert_parallel,
            max_model_len=self.max_model_len,
            lora=lora,
        )


def _recipe_of(plan: EnginePlan) -> _Recipe:
    quantization = Quantization() if plan.quantization is None else plan.quantization.quantization
    return _Recipe(
        {op: choice.name for op, choice in plan.backends.items()},
        Capabilities(
            device=plan.device,
            dtype=plan.dtype,
            weights=quantization.format,
            block_size=plan.layout.block_size,
        ),
        plan.cache_dtype,
        plan.state_dtype,
        plan.max_model_len,
        0 if plan.lora is None else plan.lora.num_slots,
        quantization,
        plan.parallel.expert,
    )


class _BuiltStage(NamedTuple):
    """One rank's share of a model on the meta device."""

    context: BuildContext
    model: CausalLM


def _build(
    recipe: _Recipe, hf_config: Mapping[str, Any], tp: TPGroup, pipeline: PipelineStage
) -> _BuiltStage:
    context = recipe.context(torch.device("meta"), tp, pipeline)
    return _BuiltStage(context, build_model(hf_config, context))


def _build_stages(recipe: _Recipe, hf_config: Mapping[str, Any], parallel: ParallelPlan) -> list[_BuiltStage]:
    """Each stage as its first rank has it; no other rank has more. ValueError for sizes that this model can't
    be divided by, with those that it can."""
    stages = [PipelineStage(stage, parallel.pipeline) for stage in range(parallel.pipeline)]
    try:
        built = [_build(recipe, hf_config, TPGroup(0, parallel.tensor), stage) for stage in stages]
    except IndivisibleError as error:
        whole, _ = _build(recipe, hf_config, TPGroup.single(), PipelineStage.single())
        sizes = range(1, MAX_TENSOR + 1)
        possible = [str(size) for size in sizes if all(each.allows(size) for each in whole.dimensions)]
        raise ValueError(f"{error}; sizes that work here: {', '.join(possible)}") from None
    divided = {dimension.what for stage in built for dimension in stage.context.dimensions}
    if parallel.expert and EXPERTS not in divided:
        raise ValueError("parallel.expert: True: this model has no experts to divide")
    return built


def _cost(context: BuildContext, layout: CacheLayout) -> StageCost:
    footprint = context.footprint
    return StageCost(
        weights=footprint.weights,
        active_parameters=context.weights.num_active_parameters,
        kv_bytes=layout.bytes_per_block // layout.block_size,
        state_bytes=layout.bytes_per_slot,
        reductions=footprint.reductions,
        gathered=footprint.gathered,
        element_bytes=context.dtype.itemsize,
    )


def _workspace(config: EngineConfig, hardware: Hardware, context: BuildContext, model: CausalLM) -> Workspace:
    return plan_workspace(
        context.footprint,
        hardware,
        ranks=context.tp.size,
        num_tokens=config.scheduler.max_num_batched_tokens,
        num_seqs=config.scheduler.max_num_seqs,
        vocab_size=model.vocab_size,
        element_bytes=context.dtype.itemsize,
        has_adapters=context.lora is not None,
    )


def _device_budget(
    config: EngineConfig, hardware: Hardware, weights: int, workspace: Workspace, adapters: int
) -> Budget:
    what = f"{size_text(weights)} of weights and {size_text(workspace.total)} of workspace"
    if adapters:
        what = f"{size_text(weights)} of weights, {size_text(workspace.total)} of workspace and "
        what += f"{size_text(adapters)} of adapters"
    taken = weights + workspace.total + adapters
    if hardware.is_here:
        return gpu_budget(config, taken, what)
    return device_budget(config, hardware, taken, what)


def _why_no_graphs(
    hardware: Hardware,
    parallel: ParallelPlan,
    backends: Mapping[str, BackendChoice],
    contexts: Sequence[BuildContext],
) -> str | None:
    """None where decode steps can be recorded, or, elsewhere, could be with backends that are made for it."""
    if hardware.device == "cpu" and parallel.num_ranks > 1:
        return "ranks on CPUs wait for each other between two calls"
    if parallel.pipeline > 1:
        return "stages of a pipeline wait for each other"
    if parallel.expert:
        return "how many tokens a rank's experts have is asked of the device (parallel.expert)"
    formats = {each for context in contexts for each in context.formats.formats.values()}
    if unfit := sorted({each.name for each in formats if not each.can_be_recorded}):
        return f"what {' and '.join(unfit)} computes depends on more than shapes"
    return _why_not_recorded(hardware, backends, [op for op in backends if op != "lora"])


def _why_not_recorded(
    hardware: Hardware, backends: Mapping[str, BackendChoice], ops: Sequence[str]
) -> str | None:
    if not hardware.is_here:
        return None
    chosen = (
        (op, backend)
        for op in ops
        if op in backends
        for backend in candidates(op)
        if backend.name == backends[op].name
    )
    unfit = [f"{op} {backend.name}" for op, backend in chosen if not backend.can_be_recorded]
    return f"what {', '.join(unfit)} launches depends on more than shapes" if unfit else None


def _backend(op: str, name: str, capabilities: Capabilities) -> Backend:
    """One that was chosen; the others are not looked at again."""
    among = [backend for backend in candidates(op) if backend.name == name]
    return select(op, name, capabilities, among).backend


def _open_choices(config: EngineConfig, used: Sequence[str]) -> dict[str, BackendChoice]:
    """For a machine that is elsewhere: what is wanted. The choice is made there."""
    return {op: BackendChoice(getattr(config.kernels, op), (), ()) for op in used}


def _choose_backends(
    config: EngineConfig, capabilities: Capabilities, used: Sequence[str]
) -> dict[str, BackendChoice]:
    chosen = {}
    if capabilities.device == "cpu":
        native.prepare(sources(used, capabilities))
    for op in used:
        wanted = getattr(config.kernels, op)
        if op == "moe" and wanted == AUTO and config.kernels.gemm == EXACT:
            wanted = EXACT
        choice = select(op, wanted, capabilities)
        chosen[op] = BackendChoice(choice.name, choice.rejected, choice.obstacles)
    return chosen


def _max_model_len(wanted: int | None, limit: int | None) -> int:
    if wanted is None:
        return limit or UNLIMITED_MODEL_LEN
    if limit is not None and wanted > limit:
        raise ValueError(
            f"max_model_len: {wanted} is above the {limit} positions that the model was made for"
        )
    return wanted
