"""Runs the model over one step's arrays. Knows tensors and the arena; knows no request (D6).

A step is launched, and collected when its result is wanted: on a GPU the host is free in between. What is
launched runs in order, so a step finds what the one before it has written and drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybridserve.distributed.pipeline import PipelineStage
from hybridserve.distributed.tp import TPGroup
from hybridserve.engine import sampler
from hybridserve.engine.device_queue import queue_of
from hybridserve.engine.graphs import DecodeGraphs
from hybridserve.engine.sampler import Draws, LogprobsOutput, Scores
from hybridserve.engine.staging import staging_for
from hybridserve.engine.step_tensors import StepTensors
from hybridserve.layers.context import ForwardContext
from hybridserve.lora.batch import make_batch, rows_with_adapters, select

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from hybridserve.engine.arena import Arena, HostArena
    from hybridserve.engine.device_queue import DeviceQueue, Mark
    from hybridserve.engine.graph_plan import GraphPlan
    from hybridserve.engine.graphs import DecodeGraph, Recorder
    from hybridserve.engine.input_builder import StepInput
    from hybridserve.engine.staging import Staging
    from hybridserve.kernels.attention.interface import AttentionBackend
    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.kernels.pointwise.interface import PointwiseBackend
    from hybridserve.kernels.ssm.interface import SSMBackend
    from hybridserve.models.base import CausalLM

PROMPT_LOGPROBS_ROWS = 128
"""Prompt rows whose logits exist at the same time: 128 x 65,536 float32 logits are 32 MiB."""


@dataclass(slots=True)
class StepOutput:
    """What a step yields: one id for each of `StepInput.sampling.rows` (-1: its logits were not finite).

    Only the rank that has the logits draws: the first of the last stage. On others there are no ids.
    """

    step_id: int
    token_ids: list[int]
    logprobs: LogprobsOutput | None = None
    prompt_logprobs: LogprobsOutput | None = None
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0


@dataclass(slots=True)
class LaunchedStep:
    """A step that the device has been told to run; `collect` waits for it."""

    step_id: int
    token_ids: torch.Tensor | None
    """On their way to the host, as scores are; None: this rank draws none."""
    scores: Scores | None
    prompt_scores: Sequence[Scores]
    begun: Mark
    forwarded: Mark
    done: Mark

    def collect(self) -> StepOutput:
        self.done.wait()
        prompt = [scores.output() for scores in self.prompt_scores]
        return StepOutput(
            self.step_id,
            [] if self.token_ids is None else self.token_ids.tolist(),
            logprobs=None if self.scores is None else self.scores.output(),
            prompt_logprobs=LogprobsOutput.concatenate(prompt) if prompt else None,
            forward_seconds=self.forwarded.seconds_since(self.begun),
            sample_seconds=self.done.seconds_since(self.forwarded),
        )


@dataclass(slots=True)
class _PromptRows:
    """A few rows of `PromptLogprobsInput`, on the host and on the device."""

    host: np.ndarray
    rows: torch.Tensor
    targets: torch.Tensor
    num_top: int


@dataclass(slots=True)
class _Staged:
    """What a step brings to the device beside its tokens. Pairs are None where there are none."""

    block_copies: torch.Tensor | None
    state_copies: torch.Tensor | None
    state_saves: torch.Tensor | None
    pending: torch.Tensor | None
    draws: Draws | None
    prompt_rows: Sequence[_PromptRows]


class ModelRunner:
    """Holds the weights, the arena, the host's memory beside it if there is any, and the tokens that the last
    step drew, which the next step may need before the scheduler has seen them."""

    def __init__(
        self,
        model: CausalLM,
        arena: Arena,
        attention: AttentionBackend,
        ssm: SSMBackend,
        pointwise: PointwiseBackend,
        host: HostArena | None = None,
        *,
        tp: TPGroup | None = None,
        pipeline: PipelineStage | None = None,
        queue: DeviceQueue | None = None,
        staging: Staging | None = None,
    ) -> None:
        """`tp` and `pipeline`: where there are several ranks; `queue` and `staging` are those of the arena's
        device unless told."""
        self.model = model
        self.arena = arena
        self.host = host
        self.graphs: DecodeGraphs | None = None
        self._attention = attention
        self._ssm = ssm
        self._pointwise = pointwise
        self._tp = tp or TPGroup.single()
        self._pipeline = pipeline or PipelineStage.single()
        self._device = arena.buffer.device
        self._queue = queue or queue_of(self._device)
        self._staging = staging or staging_for(self._queue)
        self._drawn = torch.zeros(0, dtype=torch.int64, device=self._device)
        """What the last step drew; where this rank has no logits, as many numbers without meaning."""

    @torch.inference_mode()
    def record_graphs(self, plan: GraphPlan, recorder: Recorder) -> None:
        """Record the decode steps that the plan names, over the null block and the null slot. All ranks do so
        at the same time: what is recorded may hold their collectives."""
        layout = self.arena.layout
        block_size = layout.block_size if layout.blocks_per_slab else None
        self.graphs = DecodeGraphs(plan, block_size, self.arena.buffer[: layout.slab_bytes])
        self.graphs.record(recorder, self._recordable)

    def execute(self, step: StepInput) -> StepOutput:
        return self.launch(step).collect()

    @torch.inference_mode()
    def launch(self, step: StepInput) -> LaunchedStep:
        """Waits for no step but the one before the last."""
        begun = self._queue.mark()
        self._staging.begin()
        staged = self._stage(step)
        row_slots = rows_with_adapters(
            step.adapter_slots, step.adapter_start, step.query_start, step.positions
        )
        graph = None if self.graphs is None else self.graphs.find(step, row_slots)
        hidden = lora = drawing = None
        if graph is None:
            tensors = StepTensors.of(step, self._staging.put)
            lora = make_batch(row_slots, self._staging.put)
            if step.sampling is not None:
                drawing = select(lora, step.sampling.rows, self._staging.put)
            self._staging.flush()
            self._begin(step, staged, tensors)
            hidden = self.model(tensors.input_ids, self._context(tensors, lora))
            logits = None
        else:
            logits = self._replay(graph, step, row_slots, staged)
        if staged.state_saves is not None:
            self.arena.copy_slots(*staged.state_saves.unbind(1))
        forwarded = self._queue.mark()
        prompt_scores: list[Scores] = []
        if hidden is not None:
            prompt_scores = self._prompt_scores(hidden, staged.prompt_rows, lora)
            if step.sampling is not None and staged.draws is not None:
                logits = self.model.logits(hidden[staged.draws.rows], drawing)
        token_ids = scores = None
        if logits is not None and staged.draws is not None:
            self._drawn, scores = self._draw(logits, staged.draws)
            token_ids = self._queue.fetch(self._drawn)
        elif step.sampling is not None:
            self._drawn = torch.zeros(len(step.sampling.rows), dtype=torch.int64, device=self._device)
        return LaunchedStep(
            step.step_id,
            token_ids,
            None if scores is None else scores.fetched(self._queue.fetch),
            prompt_scores,
            begun,
            forwarded,
            self._queue.mark(),
        )

    def _draw(self, logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, Scores | None]:
        return sampler.sample(logits, draws, self._pointwise)

    def _stage(self, step: StepInput) -> _Staged:
        put = self._staging.put
        prompt_rows = []
        if (wanted := step.prompt_logprobs) is not None:
            for first in range(0, len(wanted.rows), PROMPT_LOGPROBS_ROWS):
                rows, targets = (
                    column[first : first + PROMPT_LOGPROBS_ROWS] for column in (wanted.rows, wanted.targets)
                )
                prompt_rows.append(_PromptRows(rows, put(rows), put(targets), wanted.num_top))
        draws = None
        if step.sampling is not None:
            draws = sampler.prepare(step.sampling, put, self._staging.send)
        block_copies, state_copies, state_saves, pending = (
            put(each) if len(each) else None
            for each in (step.block_copies, step.state_copies, step.state_saves, step.pending)
        )
        return _Staged(block_copies, state_copies, state_saves, pending, draws, prompt_rows)

    def _begin(self, step: StepInput, staged: _Staged, tensors: StepTensors) -> None:
        """All that comes before the layers, in the order that `ScheduledStep` promises: what is swapped out
        or moved away makes room for what comes after it."""
        if self.host is not None:
            self.host.swap_out(self.arena, step.block_swaps_out, step.state_swaps_out)
        self.arena.move(step.block_moves, step.state_moves)
        if self.host is not None:
            self.host.swap_in(self.arena, step.block_swaps_in, step.state_swaps_in)
        if staged.block_copies is not None:
            self.arena.copy_blocks(*staged.block_copies.unbind(1))
        if staged.state_copies is not None:
            self.arena.copy_slots(*staged.state_copies.unbind(1))
        if staged.pending is not None:
            self._fill_in(staged.pending, tensors)

    def _fill_in(self, pending: torch.Tensor, tensors: StepTensors) -> None:
        """What the step before draws becomes this one's tokens, without the host's seeing them. One rank
        draws, and all of the first stage embed: over the devices' own connections, in the order of what is
        queued there."""
        drawn = self._drawn
        if self._tp.rank == 0:
            drawn = self._pipeline.feed_back(drawn)
        if self._pipeline.is_first:
            drawn = self._tp.broadcast(drawn)
            place, source = pending.unbind(1)
            tensors.input_ids[place] = drawn[source].clamp(min=0)

    def _context(self, tensors: StepTensors, lora: LoraBatch | None) -> ForwardContext:
        return ForwardContext(
            positions=tensors.positions,
            attention=self._attention.prepare(tensors.attention()),
            ssm=self._ssm.prepare(tensors.ssm()),
            caches=self.arena.views,
            lora=lora,
        )

    def _recordable(self, tensors: StepTensors, lora: LoraBatch | None) -> Callable[[], torch.Tensor | None]:
        """A forward pass over these tensors, whatever they hold by then: logits of each token, where this
        rank has them."""
        context = self._context(tensors, lora)

        def forward() -> torch.Tensor | None:
            hidden = self.model(tensors.input_ids, context)
            return None if hidden is None else self.model.logits(hidden, lora)

        return forward

    def _replay(
        self, graph: DecodeGraph, step: StepInput, row_slots: np.ndarray | None, staged: _Staged
    ) -> torch.Tensor | None:
        """Logits of the rows that draw, which the next replay overwrites."""
        inputs = graph.put(step, row_slots, self._staging.put)
        self._staging.flush()
        graph.load(inputs)
        self._begin(step, staged, graph.tensors)
        logits = graph.replay()
        return None if logits is None or staged.draws is None else logits[: len(staged.draws.rows)]

    def _prompt_scores(
        self, hidden: torch.Tensor, wanted: Sequence[_PromptRows], lora: LoraBatch | None
    ) -> list[Scores]:
        parts = []
        for each in wanted:
            batch = select(lora, each.host, self._staging.send)
            logits = self.model.logits(hidden[each.rows], batch)
            if logits is not None:
                scores = sampler.logprobs(logits, each.targets, each.num_top, each.host.tolist())
                parts.append(scores.fetched(self._queue.fetch))
        return parts
