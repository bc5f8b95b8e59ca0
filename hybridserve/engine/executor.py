"""How steps reach workers. The engine core sees only `submit` and `collect`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from hybridserve.engine.thread_governor import govern_threads
from hybridserve.engine.threads import limit_threads
from hybridserve.engine.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hybridserve.engine.input_builder import StepInput
    from hybridserve.engine.model_runner import LaunchedStep, StepOutput
    from hybridserve.engine.planner import EnginePlan
    from hybridserve.layers.lora import AdaptableModule
    from hybridserve.lora.adapter import Adapter


StagedAdapter = Any
"""What `stage_adapter` makes for `place_adapter`; only the executor knows what is in it."""


class Executor(ABC):
    """Runs steps in order. At most `max_in_flight` may be submitted and not yet collected."""

    max_in_flight: int = 1

    @abstractmethod
    def submit(self, step: StepInput) -> None: ...

    @abstractmethod
    def collect(self) -> StepOutput:
        """The result of the oldest submitted step."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what was submitted and not collected."""

    def restart(self) -> None:
        """After a failure that ended every sequence, so that nobody counts on what earlier steps wrote: begin
        anew. An executor that can't goes on failing."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release what the executor holds."""

    def gauges(self) -> dict[str, float]:
        """What it has to tell of this moment, for `EngineCore.gauges`."""
        return {}

    # Adapters. An executor whose model was built without them is never asked.

    @property
    def adaptable_modules(self) -> Mapping[str, AdaptableModule]:
        """What rank 0 offers to adapters."""
        return {}

    def check_adapter(self, adapter: Adapter, pause: Callable[[], None]) -> None:
        """Raise the ValueError that `stage_adapter` would raise on any rank, where reading the adapter can't
        tell: that takes the base model's weights. Any thread may call it, as `stage_adapter`."""
        raise NotImplementedError(f"{type(self).__name__} serves the base model only")

    def stage_adapter(self, adapter: Adapter, pause: Callable[[], None]) -> StagedAdapter:
        """Bring every rank's share of an adapter to its device. Any thread may call it; it runs beside steps,
        and leaves them time by calling `pause` often."""
        raise NotImplementedError(f"{type(self).__name__} serves the base model only")

    def place_adapter(self, slot: int, generation: int, staged: StagedAdapter) -> None:
        """Let the steps that are submitted from now on find it in a slot that no unfinished step uses."""
        raise NotImplementedError(f"{type(self).__name__} serves the base model only")

    def clear_adapter(self, slot: int) -> None:
        """Give back what a slot holds, if anything; no unfinished step uses it."""
        raise NotImplementedError(f"{type(self).__name__} serves the base model only")


class LocalExecutor(Executor):
    """One worker in the caller's own process and thread. On a CPU a submitted step has run when `submit`
    returns, with as many threads as get cores. A GPU runs it meanwhile, and the next one can be planned and
    submitted: what the first has drawn it finds on the device (F057)."""

    def __init__(self, model_path: Path, plan: EnginePlan) -> None:
        if plan.device == "cpu":
            limit_threads()
        self.worker = Worker(model_path, plan)
        self._is_on_cpu = plan.device == "cpu"
        self.max_in_flight = 1 if self._is_on_cpu else 2
        self._launched: deque[LaunchedStep] = deque()
        self._governor = None
        if self._is_on_cpu and not self.worker.depends_on_threads:
            self._governor = govern_threads()

    def submit(self, step: StepInput) -> None:
        if self._governor is None:
            self._launched.append(self.worker.launch(step))
        else:
            self._launched.append(self._governor.run(lambda: self.worker.launch(step)))

    def collect(self) -> StepOutput:
        return self._launched.popleft().collect()

    def reset(self) -> None:
        self._launched.clear()

    def close(self) -> None:
        del self.worker

    def gauges(self) -> dict[str, float]:
        if not self._is_on_cpu:
            return {}
        governor = self._governor
        return {"num_threads": torch.get_num_threads() if governor is None else governor.num_threads}

    @property
    def adaptable_modules(self) -> Mapping[str, AdaptableModule]:
        return self.worker.adaptable_modules

    def check_adapter(self, adapter: Adapter, pause: Callable[[], None]) -> None:
        self.worker.check_adapter(adapter, pause)

    def stage_adapter(self, adapter: Adapter, pause: Callable[[], None]) -> StagedAdapter:
        return self.worker.stage_adapter(adapter, pause)

    def place_adapter(self, slot: int, generation: int, staged: StagedAdapter) -> None:
        self.worker.place_adapter(slot, generation, staged)

    def clear_adapter(self, slot: int) -> None:
        self.worker.clear_adapter(slot)
