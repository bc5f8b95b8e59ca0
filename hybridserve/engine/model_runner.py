"""Runs the model over one step's arrays. Knows tensors and the arena; knows no request (D6)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hybridserve.engine import sampler
from hybridserve.engine.sampler import LogprobsOutput
from hybridserve.kernels.attention.interface import AttentionBackend, AttentionMetadata
from hybridserve.kernels.ssm.interface import SSMBackend, SSMMetadata
from hybridserve.layers.context import ForwardContext
from hybridserve.lora.batch import make_batch, select

if TYPE_CHECKING:
    from hybridserve.engine.arena import Arena, HostArena
    from hybridserve.engine.input_builder import PromptLogprobsInput, StepInput
    from hybridserve.kernels.lora.interface import LoraBatch
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


class ModelRunner:
    """Holds the weights, the arena, the host's memory beside it if there is any, and the tokens that the last
    step drew, which the next step may need before the scheduler has seen them."""

    def __init__(
        self,
        model: CausalLM,
        arena: Arena,
        attention: AttentionBackend,
        ssm: SSMBackend,
        host: HostArena | None = None,
    ) -> None:
        self.model = model
        self.arena = arena
        self.host = host
        self._attention = attention
        self._ssm = ssm
        self._device = arena.buffer.device
        self._drawn = torch.zeros(0, dtype=torch.int64, device=self._device)

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        start = time.perf_counter()
        self._copy_units(step)
        context = self._context(step)
        hidden = self.model(self._input_ids(step), context)
        if len(step.state_saves):
            self.arena.copy_slots(*self._to_device(step.state_saves).unbind(1))
        forwarded = time.perf_counter()
        output = StepOutput(step.step_id, [])
        if hidden is None:
            output.forward_seconds = forwarded - start
            return output
        if step.prompt_logprobs is not None:
            output.prompt_logprobs = self._prompt_logprobs(hidden, step.prompt_logprobs, context.lora)
        if step.sampling is not None:
            logits = self._logits(hidden, step.sampling.rows, context.lora)
            if logits is not None:
                self._drawn, output.logprobs = sampler.sample(logits, step.sampling)
                output.token_ids = self._drawn.tolist()
        output.forward_seconds = forwarded - start
        output.sample_seconds = time.perf_counter() - forwarded
        return output

    def _copy_units(self, step: StepInput) -> None:
        """In the order that `ScheduledStep` promises: what is swapped out or moved away makes room for what
        comes after it."""
        if self.host is not None:
            self.host.swap_out(self.arena, step.block_swaps_out, step.state_swaps_out)
        self.arena.move(step.block_moves, step.state_moves)
        if self.host is not None:
            self.host.swap_in(self.arena, step.block_swaps_in, step.state_swaps_in)
        if len(step.block_copies):
            self.arena.copy_blocks(*self._to_device(step.block_copies).unbind(1))
        if len(step.state_copies):
            self.arena.copy_slots(*self._to_device(step.state_copies).unbind(1))

    def _input_ids(self, step: StepInput) -> torch.Tensor:
        input_ids = self._to_device(step.input_ids)
        if len(step.pending):
            place, source = self._to_device(step.pending).unbind(1)
            input_ids[place] = self._drawn[source].clamp(min=0)
        return input_ids

    def _context(self, step: StepInput) -> ForwardContext:
        query_start = self._to_device(step.query_start)
        query_lens = np.diff(step.query_start)
        lens = query_lens.tolist()
        attention = AttentionMetadata(
            query_start=query_start,
            seq_lens=self._to_device(step.seq_lens),
            block_table=self._to_device(step.block_table).to(torch.int64),
            slot_mapping=self._to_device(step.slot_mapping),
            query_lens=lens,
            context_lens=(step.seq_lens - query_lens).tolist(),
        )
        ssm = SSMMetadata(
            query_start=query_start,
            state_slots=self._to_device(step.state_slots),
            has_state=self._to_device(step.has_state),
            query_lens=lens,
        )
        return ForwardContext(
            positions=self._to_device(step.positions),
            attention=self._attention.prepare(attention),
            ssm=self._ssm.prepare(ssm),
            caches=self.arena.views,
            lora=make_batch(
                step.adapter_slots, step.adapter_start, step.query_start, step.positions, self._device
            ),
        )

    def _logits(self, hidden: torch.Tensor, rows: np.ndarray, lora: LoraBatch | None) -> torch.Tensor | None:
        return self.model.logits(hidden[self._to_device(rows)], select(lora, rows))

    def _prompt_logprobs(
        self, hidden: torch.Tensor, wanted: PromptLogprobsInput, lora: LoraBatch | None
    ) -> LogprobsOutput | None:
        parts = []
        for first in range(0, len(wanted.rows), PROMPT_LOGPROBS_ROWS):
            rows = wanted.rows[first : first + PROMPT_LOGPROBS_ROWS]
            targets = self._to_device(wanted.targets[first : first + PROMPT_LOGPROBS_ROWS])
            logits = self._logits(hidden, rows, lora)
            if logits is not None:
                parts.append(sampler.logprobs(logits, targets, wanted.num_top, rows.tolist()))
        return LogprobsOutput.concatenate(parts) if parts else None

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
