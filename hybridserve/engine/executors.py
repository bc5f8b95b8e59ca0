"""Which executor serves a configuration, and the one over several ranks.

Knows `parallel.executor`; what ranks do together is `engine.ranks`'.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from hybridserve.distributed.failure import RankFailure
from hybridserve.engine.executor import Executor, LocalExecutor
from hybridserve.engine.launchers import Launcher, ProcessLauncher, TorchrunLauncher
from hybridserve.engine.planner import bare_context, offered_modules
from hybridserve.engine.rank import serve
from hybridserve.engine.ranks import Ranks, StagedOnRanks
from hybridserve.engine.rendezvous import Assignment
from hybridserve.engine.wire import encode_step
from hybridserve.lora.loader import no_pause
from hybridserve.models.config import load_hf_config
from hybridserve.models.registry import build_model
from hybridserve.models.weights import check_weights
from hybridserve.quant.policy import Quantization

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from hybridserve.config.schema import ParallelConfig
    from hybridserve.engine.input_builder import StepInput
    from hybridserve.engine.model_runner import StepOutput
    from hybridserve.engine.plan import EnginePlan
    from hybridserve.layers.lora import AdaptableModule
    from hybridserve.lora.adapter import Adapter


def create_executor(parallel: ParallelConfig, plan: EnginePlan, model_path: Path) -> Executor:
    """Start the ranks that the plan wants, and load the model on them.

    Of the processes that torchrun started, it returns in rank 0 only: the others serve until rank 0 closes
    its executor, then exit. ValueError, naming the key, where the ranks are not those of the plan, and
    naming the tensor, where the checkpoint is broken; RankFailure if a rank fails while it loads.
    """
    kind = parallel.executor
    if kind == "auto":
        kind = "torchrun" if TorchrunLauncher.is_present(os.environ) else "mp"
    launcher: Launcher
    if kind == "torchrun":
        launcher = TorchrunLauncher(os.environ, parallel.tensor, parallel.pipeline)
        if launcher.rank > 0:
            _serve_and_exit(launcher)
    elif kind == "ray":
        from hybridserve.engine.ray_launcher import RayLauncher

        launcher = RayLauncher(needs_gpu=plan.device == "cuda")
    else:
        launcher = ProcessLauncher()
    if parallel.num_ranks == 1:
        return LocalExecutor(model_path, plan)
    check_checkpoint(model_path, plan)
    return RanksExecutor(Assignment(model_path, plan, parallel.step_timeout, parallel.interface), launcher)


def check_checkpoint(path: Path, plan: EnginePlan) -> None:
    """ValueError, naming the tensor, for a checkpoint that some rank could not load, whichever has it: said
    once, before any is started. Reads no number."""
    quantization = Quantization() if plan.quantization is None else plan.quantization.quantization
    model = build_model(load_hf_config(path), bare_context(plan.dtype, quantization))
    check_weights(model, path)


def _serve_and_exit(launcher: TorchrunLauncher) -> NoReturn:
    try:
        serve(launcher.connect_store(), launcher.rank, launcher.local_rank)
    except Exception:
        # rank 0 knows why, and says it once; threads that wait for others would hold up an orderly exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.exit(0)


class RanksExecutor(Executor):
    """One worker a rank, this process' among them. A step that was launched runs to its end on all ranks,
    whether or not its result is collected. On GPUs two are in flight, as with one GPU (F057): what the first
    draws, the others have from the rank that draws it.

    Where a rank fails, whatever is called raises RankFailure. With a launcher that can, `restart` then starts
    fresh ranks, whose memory is empty; not if they fail again before they have finished a single step.
    """

    def __init__(self, assignment: Assignment, launcher: Launcher) -> None:
        self._assignment = assignment
        self._launcher = launcher
        self.max_in_flight = 1 if assignment.plan.device == "cpu" else 2
        self._launches: deque[Future[None]] = deque()
        """Of the steps that have not been collected."""
        self._result: Future[StepOutput] | None = None
        """Of the oldest of them, once somebody wants it."""
        self._has_finished_steps = False
        self._slots: dict[int, tuple[int, Adapter]] = {}
        """Where ranks may be started again: generation and content of each adapter slot."""
        self._modules: Mapping[str, AdaptableModule] | None = None
        self._ranks = Ranks(assignment, launcher)
        self._closer = weakref.finalize(self, self._ranks.close)

    def submit(self, step: StepInput) -> None:
        self._launches.append(self._ranks.submit(step, encode_step(step)))

    def collect(self) -> StepOutput:
        self._result = self._ranks.finish()
        self._launches[0].result()
        output = self._result.result()
        self._result = None
        self._launches.popleft()
        self._has_finished_steps = True
        return output

    def reset(self) -> None:
        if self._result is not None:
            self._result.cancel()  # first: it needs a step that was launched
            self._result = None
        was_launched = False
        while self._launches:
            was_launched |= not self._launches.popleft().cancel()
        if was_launched:
            self._ranks.drop()

    def close(self) -> None:
        self.reset()
        self._closer()

    def restart(self) -> None:
        if self._ranks.failure is None or not (self._launcher.can_restart and self._has_finished_steps):
            return
        self._closer.detach()
        self._ranks.close(keep_worker=True)
        try:
            ranks = self._fresh_ranks()
        except RankFailure:
            self._has_finished_steps = False
            raise
        self._ranks = ranks
        self._closer = weakref.finalize(self, ranks.close)
        self._has_finished_steps = False

    def _fresh_ranks(self) -> Ranks:
        """With the adapters in the slots where they were."""
        ranks = Ranks(self._assignment, self._launcher, self._ranks)
        try:
            for slot, (generation, adapter) in self._slots.items():
                staged = ranks.stage_adapter(adapter, no_pause)
                ranks.clear_adapter(slot)
                ranks.place_adapter(slot, generation, staged)
        except BaseException:  # also Ctrl-C: the next call begins again
            ranks.close(keep_worker=True)
            raise
        return ranks

    # ---- adapters

    @property
    def adaptable_modules(self) -> Mapping[str, AdaptableModule]:
        """Of all ranks together; with weights as far as rank 0 has them."""
        if self._modules is None:
            mine = self._ranks.worker.adaptable_modules
            self._modules = mine
            plan = self._assignment.plan
            if mine and (plan.parallel.pipeline > 1 or plan.parallel.expert):
                offered = offered_modules(plan, load_hf_config(self._assignment.model_path))
                self._modules = {
                    name: replace(mine.get(name, module), stage=module.stage, rank=module.rank)
                    for name, module in offered.items()
                }
        return self._modules

    def check_adapter(self, adapter: Adapter, pause: Callable[[], None]) -> None:
        self._ranks.check_adapter(adapter, pause)

    def stage_adapter(self, adapter: Adapter, pause: Callable[[], None]) -> StagedOnRanks:
        staged = self._ranks.stage_adapter(adapter, pause)
        staged.adapter = adapter if self._launcher.can_restart else None
        return staged

    def place_adapter(self, slot: int, generation: int, staged: StagedOnRanks) -> None:
        self._ranks.place_adapter(slot, generation, staged)
        if staged.adapter is not None:
            self._slots[slot] = generation, staged.adapter

    def clear_adapter(self, slot: int) -> None:
        self._slots.pop(slot, None)
        if self._ranks.failure is None:
            self._ranks.clear_adapter(slot)
        else:
            self._ranks.worker.clear_adapter(slot)
