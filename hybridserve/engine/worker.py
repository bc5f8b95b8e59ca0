"""One rank: a device, this rank's share of the weights and of the adapters that are loaded, its arena and its
host memory. Stateless between steps but for those (D6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.engine.arena import Arena, HostArena
from hybridserve.engine.call_recorder import CallRecorder
from hybridserve.engine.gpus import rank_device
from hybridserve.engine.graphs import CUDARecorder
from hybridserve.engine.model_runner import ModelRunner
from hybridserve.engine.planner import EnginePlan, build_context
from hybridserve.kernels.registry import candidates
from hybridserve.lora.layers import PlacedAdapter, check_adapter, place_adapter, remove
from hybridserve.models.weights import load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hybridserve.distributed.pipeline import PipelineStage
    from hybridserve.distributed.tp import TPGroup
    from hybridserve.engine.graph_plan import GraphPlan
    from hybridserve.engine.graphs import Recorder
    from hybridserve.engine.input_builder import StepInput
    from hybridserve.engine.model_runner import LaunchedStep
    from hybridserve.layers.lora import AdaptableModule
    from hybridserve.lora.adapter import Adapter


class Worker:
    """Loads the model as the plan says, then executes steps. What it knows of an adapter is its slot, and the
    generation of what is in there."""

    def __init__(
        self,
        model_path: Path,
        plan: EnginePlan,
        tp: TPGroup | None = None,
        pipeline: PipelineStage | None = None,
        adapter_tp: TPGroup | None = None,
        advance: Callable[[], None] = lambda: None,
        local_rank: int = 0,
    ) -> None:
        """One of several ranks has its groups from whoever started it: `adapter_tp` holds the same ranks as
        `tp`, for the thread that stages adapters while steps run. `advance` is called as loading gets on;
        `local_rank` is its number among the ranks of this machine. ValueError for a GPU that is not there."""
        context = build_context(plan, rank_device(plan.device, local_rank), tp, pipeline)
        model = load_model(model_path, context, advance)
        layout = plan.stages[context.pipeline.stage].layout
        self.arena = Arena(layout, context.device)
        self.host = HostArena(layout, plan.host.num_slabs, context.device) if plan.host.num_slabs else None
        self.runner = ModelRunner(
            model,
            self.arena,
            context.attention,
            context.ssm,
            context.pointwise,
            self.host,
            tp=context.tp,
            pipeline=context.pipeline,
        )
        self._context = context
        chosen = (
            each
            for op, choice in plan.backends.items()
            for each in candidates(op)
            if each.name == choice.name
        )
        self.depends_on_threads = any(each.depends_on_threads for each in chosen) or any(
            each.depends_on_threads for each in context.formats.formats.values()
        )
        """Whether a result's last bits may be others with another number of threads."""
        self._adapter_tp = adapter_tp or context.tp
        self._max_rank = 0 if plan.lora is None else plan.lora.max_rank
        self._poison_freed = plan.lora is not None and plan.lora.poison_freed
        self._adapters: dict[int, tuple[int, PlacedAdapter]] = {}
        if plan.graphs.sizes:
            self.record_graphs(
                plan.graphs, CUDARecorder(context.device) if context.device.type == "cuda" else CallRecorder()
            )

    def record_graphs(self, plan: GraphPlan, recorder: Recorder) -> None:
        """Before there are any adapters: those that come later find room in what is recorded."""
        if plan.adapter_sizes and not plan.on_demand:
            assert self._context.lora is not None
            self._context.lora.reserve(self._max_rank, self._context.dtype)
            self._context.lora.write(self._context.device)
        self.runner.record_graphs(plan, recorder)

    def launch(self, step: StepInput) -> LaunchedStep:
        """RuntimeError, and nothing runs, for a step that was planned with another adapter in a slot than
        there is."""
        self.check_adapters(step)
        return self.runner.launch(step)

    def check_adapters(self, step: StepInput) -> None:
        for slot, generation in step.adapter_generations.tolist():
            held = self._adapters.get(slot)
            if held is None or held[0] != generation:
                raise RuntimeError(
                    f"step {step.step_id} needs generation {generation} of adapter slot {slot}, which holds "
                    f"{'nothing' if held is None else f'generation {held[0]}'}"
                )

    @property
    def adaptable_modules(self) -> Mapping[str, AdaptableModule]:
        return {} if self._context.lora is None else self._context.lora.modules

    @property
    def adapter_bytes(self) -> int:
        """What the adapters in slots take of the device."""
        return sum(placed.num_bytes for _, placed in self._adapters.values())

    def check_adapter(self, adapter: Adapter, pause: Callable[[], None]) -> None:
        """Raise the ValueError that `stage_adapter` would, for this rank's share; nothing stays on the
        device. Any thread may call it."""
        context = self._context
        modules = self.adaptable_modules
        check_adapter(adapter, modules, context.dtype, context.device, self._adapter_tp, pause)

    def stage_adapter(self, adapter: Adapter, pause: Callable[[], None]) -> PlacedAdapter:
        """Cut, cast and copy this rank's share to the device. Touches no slot, so any thread may call it."""
        context = self._context
        modules = self.adaptable_modules
        return place_adapter(adapter, modules, context.dtype, context.device, self._adapter_tp, pause)

    def place_adapter(self, slot: int, generation: int, placed: PlacedAdapter) -> None:
        """Again, if it was interrupted. RuntimeError for a slot that still holds another adapter."""
        assert self._context.lora is not None
        held = self._adapters.get(slot)
        if held is not None and held[1] is not placed:
            raise RuntimeError(f"adapter slot {slot} was not cleared before it was given to another adapter")
        remove(slot, self._context.lora.tables)
        placed.install(slot)
        self._adapters_changed()
        self._adapters[slot] = (generation, placed)

    def _adapters_changed(self) -> None:
        """Before a step runs that reads what was recorded."""
        assert self._context.lora is not None
        self._context.lora.write(self._context.device)
        if self.runner.graphs is not None:
            self.runner.graphs.forget_adapters()

    def clear_adapter(self, slot: int) -> None:
        """Nothing is left in the slot, nor, where integrity is checked, in the memory that it had."""
        held = self._adapters.pop(slot, None)
        if held is None:
            return
        assert self._context.lora is not None
        remove(slot, self._context.lora.tables)
        self._adapters_changed()
        if self._poison_freed:
            held[1].poison()
