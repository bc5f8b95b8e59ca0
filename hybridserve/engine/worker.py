"""One rank: a device, this rank's share of the weights, and its arena. Stateless between steps but for those
(D6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybridserve.engine.arena import Arena
from hybridserve.engine.model_runner import ModelRunner, StepOutput
from hybridserve.engine.planner import EnginePlan, build_context
from hybridserve.models.weights import load_model

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.engine.input_builder import StepInput


class Worker:
    """Loads the model as the plan says, then executes steps."""

    def __init__(self, model_path: Path, plan: EnginePlan) -> None:
        context = build_context(plan, torch.device(plan.device))
        model = load_model(model_path, context)
        self.arena = Arena(plan.layout, context.device)
        self.runner = ModelRunner(model, self.arena, context.attention, context.ssm)

    def execute(self, step: StepInput) -> StepOutput:
        return self.runner.execute(step)
