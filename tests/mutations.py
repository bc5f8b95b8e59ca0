"""The faults of the recipes, as monkeypatches. Each one makes the engine wrong in the way that its recipe is
about; none merely raises.

`MUTATIONS` maps a recipe's name to a function that injects its fault through a pytest.MonkeyPatch;
`W8A8_MUTATIONS` are those of formats that round activations.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hybridserve.core.cache_manager import CacheManager, ForkCopies
from hybridserve.core.scheduler import Scheduler
from hybridserve.core.slot_pool import SlotPool
from hybridserve.engine.input_builder import InputBuilder, StepInput
from hybridserve.kernels.ssm import BACKENDS as SSM_BACKENDS
from hybridserve.quant.scaled import ScaledFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def change_input(patch: pytest.MonkeyPatch, change: Callable[[StepInput], None]) -> None:
    """Let `change` spoil every step's arrays."""
    plain = InputBuilder.build

    def build(self: InputBuilder, *args: Any) -> Any:
        built = plain(self, *args)
        change(built.input)
        return built

    patch.setattr(InputBuilder, "build", build)


def around_conv(
    patch: pytest.MonkeyPatch,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Let `before(state, metadata)` and `after(y, state, metadata)` spoil every backend's convolutions."""
    for backend in SSM_BACKENDS:
        patch.setattr(backend, "causal_conv1d", _around(backend.causal_conv1d, before, after))


def _around(
    plain: Callable[..., torch.Tensor], before: Callable[..., None] | None, after: Callable[..., None] | None
) -> Callable[..., torch.Tensor]:
    @functools.wraps(plain)
    def conv(
        self: Any, x: Any, weight: Any, bias: Any, state: Any, metadata: Any, **more: Any
    ) -> torch.Tensor:
        if before:
            before(state, metadata)
        y = plain(self, x, weight, bias, state, metadata, **more)
        if after:
            after(y, state, metadata)
        return y

    return conv


def lengths(step: StepInput) -> np.ndarray:
    return np.diff(step.query_start)


def one_token_means_decode(patch: pytest.MonkeyPatch) -> None:
    def change(step: StepInput) -> None:
        step.has_state = lengths(step) == 1

    change_input(patch, change)


def slots_are_trusted_to_be_clean(patch: pytest.MonkeyPatch) -> None:
    change_input(patch, lambda step: step.has_state.fill(True))


def preempted_slot_is_kept(patch: pytest.MonkeyPatch) -> None:
    plain = Scheduler.preempt

    def preempt(self: Scheduler, request: Any) -> None:
        slot, request.state_slot = request.state_slot, 0
        plain(self, request)
        request.state_slot = slot

    patch.setattr(Scheduler, "preempt", preempt)


def several_tokens_mean_a_start(patch: pytest.MonkeyPatch) -> None:
    def change(step: StepInput) -> None:
        step.has_state = step.has_state & (lengths(step) == 1)

    change_input(patch, change)


def conv_is_zero_padded_at_borders(patch: pytest.MonkeyPatch) -> None:
    def before(state: torch.Tensor, metadata: Any) -> None:
        state[metadata.state_slots] = 0

    around_conv(patch, before=before)


def conv_state_is_one_tap_off(patch: pytest.MonkeyPatch) -> None:
    def after(y: torch.Tensor, state: torch.Tensor, metadata: Any) -> None:
        state[metadata.state_slots] = state[metadata.state_slots].roll(1, dims=-1)

    around_conv(patch, after=after)


def prefills_are_thought_to_come_first(patch: pytest.MonkeyPatch) -> None:
    def change(step: StepInput) -> None:
        order = np.argsort(-lengths(step), kind="stable")
        step.state_slots, step.has_state = step.state_slots[order], step.has_state[order]

    change_input(patch, change)


def slots_follow_rows(patch: pytest.MonkeyPatch) -> None:
    def change(step: StepInput) -> None:
        step.state_slots = step.state_slots.min() + np.arange(len(step.state_slots))

    change_input(patch, change)


def padding_takes_a_live_slot(patch: pytest.MonkeyPatch) -> None:
    def change(step: StepInput) -> None:
        live = step.state_slots[step.state_slots > 0]
        if len(live):
            step.state_slots[step.state_slots == 0] = live.min()

    change_input(patch, change)


def padding_rows_of_the_conv_stay_unwritten(patch: pytest.MonkeyPatch) -> None:
    def after(y: torch.Tensor, state: torch.Tensor, metadata: Any) -> None:
        padding = (metadata.state_slots == 0).nonzero()[:, 0]
        y[metadata.query_start[padding]] = torch.nan

    around_conv(patch, after=after)


def the_last_row_leaks_into_all(patch: pytest.MonkeyPatch) -> None:
    def after(y: torch.Tensor, state: torch.Tensor, metadata: Any) -> None:
        if metadata.state_slots[-1] == 0:
            y[:-1] += 0.1 * y[-1]

    around_conv(patch, after=after)


def slots_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    plain_fits, plain_allocate = CacheManager.fits, SlotPool.allocate
    patch.setattr(CacheManager, "fits", lambda self, num_blocks, num_slots: plain_fits(self, num_blocks, 0))
    patch.setattr(
        SlotPool, "allocate", lambda self, owner: plain_allocate(self, owner) or next(iter(self._owners))
    )


def an_aborted_slot_leaks(patch: pytest.MonkeyPatch) -> None:
    plain = CacheManager.release

    def release(self: CacheManager, request: Any) -> None:
        if request.finish_reason == "abort":
            request.state_slot = 0
        plain(self, request)

    patch.setattr(CacheManager, "release", release)


def chunks_are_rounded_down(patch: pytest.MonkeyPatch) -> None:
    plain = Scheduler.schedule

    def schedule(self: Scheduler) -> Any:
        rounded = self.max_num_batched_tokens // 4 * 4
        if rounded == 0:
            return None
        self.max_num_batched_tokens, budget = rounded, self.max_num_batched_tokens
        try:
            return plain(self)
        finally:
            self.max_num_batched_tokens = budget

    patch.setattr(Scheduler, "schedule", schedule)


def memory_is_freed_at_once(patch: pytest.MonkeyPatch) -> None:
    plain = CacheManager.release

    def release(self: CacheManager, request: Any) -> None:
        last_step, request.last_step = request.last_step, -1
        plain(self, request)
        request.last_step = last_step

    patch.setattr(CacheManager, "release", release)


def a_fork_forgets_the_state(patch: pytest.MonkeyPatch) -> None:
    plain = CacheManager.fork

    def fork(self: CacheManager, parent: Any, child: Any) -> Any:
        copies = plain(self, parent, child)
        return copies and ForkCopies((), copies.blocks)

    patch.setattr(CacheManager, "fork", fork)


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "f001_first_chunk_of_one_token": one_token_means_decode,
    "f003_every_state_tensor_starts_clean": slots_are_trusted_to_be_clean,
    "f004_preempted_slot": preempted_slot_is_kept,
    "f013_chunks_of_11_3_1_5": several_tokens_mean_a_start,
    "f014_every_split_of_a_prompt": conv_is_zero_padded_at_borders,
    "f019_short_prompts": conv_state_is_one_tap_off,
    "f021_interleavings": prefills_are_thought_to_come_first,
    "f025_more_rows_than_the_budget": slots_follow_rows,
    "f026_padding_and_slot_0": padding_takes_a_live_slot,
    "f027_padding_and_the_lowest_slot": padding_takes_a_live_slot,
    "f029_scratch_memory_is_nan": padding_rows_of_the_conv_stay_unwritten,
    "f031_trailing_padding_changes_nothing": the_last_row_leaks_into_all,
    "f032_padding_on_any_side": padding_takes_a_live_slot,
    "f033_more_sequences_allowed_than_slots": slots_are_not_counted,
    "f034_twice_as_many_requests_as_slots": slots_are_not_counted,
    "f036_abort_in_every_state": an_aborted_slot_leaks,
    "f041_every_step_advances": chunks_are_rounded_down,
    "f057_freed_under_a_running_step": memory_is_freed_at_once,
    "fork_n": a_fork_forgets_the_state,
}


def projections_keep_activations(patch: pytest.MonkeyPatch) -> None:
    plain = ScaledFormat._linear
    patch.setattr(ScaledFormat, "_linear", lambda self, w: plain(self, w)._replace(int8_rows=False))


def experts_keep_activations(patch: pytest.MonkeyPatch) -> None:
    plain = ScaledFormat._experts

    def experts(self: Any, weights: Any) -> Any:
        return tuple(weight._replace(int8_rows=False) for weight in plain(self, weights))

    patch.setattr(ScaledFormat, "_experts", experts)


W8A8_MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "projections_keep_activations": projections_keep_activations,
    "experts_keep_activations": experts_keep_activations,
}
