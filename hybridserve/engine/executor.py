"""How steps reach workers. The engine core sees only `submit` and `collect`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from hybridserve.engine.worker import Worker

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.engine.input_builder import StepInput
    from hybridserve.engine.model_runner import StepOutput
    from hybridserve.engine.planner import EnginePlan


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

    @abstractmethod
    def close(self) -> None:
        """Release what the executor holds."""


class LocalExecutor(Executor):
    """One worker in the caller's own process and thread: a submitted step has run when `submit` returns."""

    def __init__(self, model_path: Path, plan: EnginePlan) -> None:
        self.worker = Worker(model_path, plan)
        self._results: list[StepOutput] = []

    def submit(self, step: StepInput) -> None:
        self._results.append(self.worker.execute(step))

    def collect(self) -> StepOutput:
        return self._results.pop(0)

    def reset(self) -> None:
        self._results.clear()

    def close(self) -> None:
        del self.worker
