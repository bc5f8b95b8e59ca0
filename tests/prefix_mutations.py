"""The faults of the recipes about prefixes, as monkeypatches. `PREFIX_MUTATIONS` maps a recipe's name to a
function that injects its fault; none merely raises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hybridserve.core import prefix_cache
from hybridserve.core.cache_manager import CacheManager
from hybridserve.core.prefix_cache import PrefixCache
from hybridserve.core.prefix_trails import Match
from hybridserve.core.prefix_waits import PrefixWaits
from hybridserve.core.scheduler import Scheduler
from hybridserve.engine import makers, planner
from tests.mutations import (
    an_aborted_slot_leaks,
    change_input,
    lengths,
    memory_is_freed_at_once,
    slots_are_trusted_to_be_clean,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from hybridserve.core.plan import StepPlan
    from hybridserve.core.request import Request
    from hybridserve.engine.input_builder import StepInput


def blocks_alone_are_a_hit(patch: pytest.MonkeyPatch) -> None:
    """However far K and V reach, that many tokens are taken for done; the slot is what it is."""
    plain = PrefixCache.match

    def match(self: PrefixCache, request: Request) -> Match:
        found = plain(self, request)
        return Match(len(found.shared) * self._size, found.shared, None)

    patch.setattr(PrefixCache, "match", match)


def restart_believes_what_was_computed(patch: pytest.MonkeyPatch) -> None:
    plain = Scheduler.restart

    def restart(self: Scheduler) -> Any:
        cache = self.cache
        unborn = plain(self)
        self.cache = cache  # with all that is in the tree
        return unborn

    patch.setattr(Scheduler, "restart", restart)


def checkpoints_are_used_in_place(patch: pytest.MonkeyPatch) -> None:
    """No copy: the request advances the checkpoint itself."""

    def change(step: StepInput) -> None:
        for source, destination in step.state_copies:
            step.state_slots[step.state_slots == destination] = source
        step.state_copies = step.state_copies[:0]

    change_input(patch, change)


def saves_follow_each_other(patch: pytest.MonkeyPatch) -> None:
    """Each checkpoint gets the state of the sequence before."""

    def change(step: StepInput) -> None:
        if len(step.state_saves):
            step.state_saves[:, 0] = np.roll(step.state_saves[:, 0], 1)

    change_input(patch, change)


def short_chunks_save_nothing(patch: pytest.MonkeyPatch) -> None:
    def change(step: StepInput) -> None:
        if lengths(step).max() < 8:
            step.state_saves = step.state_saves[:0]

    change_input(patch, change)


def mixed_steps_save_nothing(patch: pytest.MonkeyPatch) -> None:
    def change(step: StepInput) -> None:
        if len(step.query_start) > 2:
            step.state_saves = step.state_saves[:0]

    change_input(patch, change)


def hits_are_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "let_go", lambda self, match: None)


def a_due_checkpoint_comes_first(patch: pytest.MonkeyPatch) -> None:
    """Where there is no slot for it, a sequence makes room."""
    plain = Scheduler.schedule

    def schedule(self: Scheduler) -> Any:
        before = self.cache.prefix.counters.num_skipped_checkpoints
        step = plain(self)
        if self.cache.prefix.counters.num_skipped_checkpoints > before:
            self.preempt(self._running.last)
        return step

    patch.setattr(Scheduler, "schedule", schedule)


def room_is_made_before_hits_are_held(patch: pytest.MonkeyPatch) -> None:
    plain = CacheManager.admit

    def admit(self: CacheManager, request: Request, match: Match, num_blocks: int, plan: StepPlan) -> bool:
        blocks = match.blocks
        self.make_room(num_blocks, 1)
        for node, block in zip(match.shared, blocks, strict=True):
            self.blocks._references.setdefault(block, 0)
            node.block = block
        return plain(self, request, match, num_blocks, plan)

    patch.setattr(CacheManager, "admit", admit)


def checkpoints_only_at_the_end(patch: pytest.MonkeyPatch) -> None:
    plain = prefix_cache.plan_cuts
    patch.setattr(prefix_cache, "plan_cuts", lambda *args, **options: plain(*args, **options)[-1:])


def no_checkpoint_in_a_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_cache, "plan_cuts", lambda *args, **options: [])


def saves_come_a_step_late(patch: pytest.MonkeyPatch) -> None:
    late: list[np.ndarray] = []

    def change(step: StepInput) -> None:
        late.append(step.state_saves)
        step.state_saves = late[-2] if len(late) > 1 else step.state_saves[:0]

    change_input(patch, change)


def any_interval_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "plan_checkpoint_interval", lambda cache, layout: cache.checkpoint_interval)


def saves_read_the_null_slot(patch: pytest.MonkeyPatch) -> None:
    change_input(patch, lambda step: step.state_saves[:, 0].fill(0))


def the_head_goes_first(patch: pytest.MonkeyPatch) -> None:
    """To evict one thing takes all that follows with it."""

    def evict(self: PrefixCache) -> bool:
        count = self.index.num_evictable_blocks + self.index.num_evictable_slots
        while plain(self) or plain_checkpoint(self):
            pass
        return count > 0

    plain, plain_checkpoint = PrefixCache.evict_block, PrefixCache.evict_checkpoint
    patch.setattr(PrefixCache, "evict_block", evict)
    patch.setattr(PrefixCache, "evict_checkpoint", evict)


def saves_come_before_the_layers(patch: pytest.MonkeyPatch) -> None:
    def change(step: StepInput) -> None:
        step.state_copies = np.concatenate([step.state_copies, step.state_saves])
        step.state_saves = step.state_saves[:0]

    change_input(patch, change)


def turns_leave_nothing(patch: pytest.MonkeyPatch) -> None:
    """The whole conversation is computed again each turn."""
    patch.setattr(PrefixCache, "match", lambda self, request: Match())


def caching_is_switched_off(patch: pytest.MonkeyPatch) -> None:
    """Wherever adapters may be loaded; nobody is told."""

    def quiet(*args: Any, **options: Any) -> Scheduler:
        if options["adapters"] is not None:
            options["prefix_caching"] = False
        return Scheduler(*args, **options)

    patch.setattr(makers, "Scheduler", quiet)


def shared_blocks_are_written(patch: pytest.MonkeyPatch) -> None:
    """Tokens between the checkpoint and the end of K and V write theirs again."""
    plain = PrefixCache.begin

    def begin(self: PrefixCache, request: Request, match: Match, plan: StepPlan) -> None:
        plain(self, request, match, plan)
        request.write_from = 0

    patch.setattr(PrefixCache, "begin", begin)


def the_last_blocks_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A hit of everything would leave no token to compute: so a whole block is left out, always."""
    plain = PrefixCache.match

    def match(self: PrefixCache, request: Request) -> Match:
        found = plain(self, request)
        return found if found.num_tokens < 64 else Match()

    patch.setattr(PrefixCache, "match", match)


def states_are_a_block_off(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint is taken for one of a block more, where K and V reach that far."""
    plain = PrefixCache.match

    def match(self: PrefixCache, request: Request) -> Match:
        found = plain(self, request)
        if found.node is None or found.num_tokens + self._size > len(found.blocks) * self._size:
            return found
        return found._replace(num_tokens=found.num_tokens + self._size)

    patch.setattr(PrefixCache, "match", match)


def nobody_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "wait", lambda self, request, match, step_id: False)


def half_a_block_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Of a prompt that is given up, the block that was begun counts as full."""
    plain = PrefixCache.close

    def close(self: PrefixCache, request: Request) -> None:
        start, size = request.num_computed, self._size
        if 0 < start < request.num_prompt and len(request.block_ids) * size > start // size * size:
            request.num_computed = (start // size + 1) * size
            self.computed(request, start)
        plain(self, request)

    patch.setattr(PrefixCache, "close", close)


def who_has_left_is_woken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixWaits, "leave", lambda self, trail: None)


PREFIX_MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "f005_kv_without_a_state": blocks_alone_are_a_hit,
    "f008_the_copy_fails": restart_believes_what_was_computed,
    "f009_what_a_tenant_left": slots_are_trusted_to_be_clean,
    "f011_short_chunks_after_a_hit": checkpoints_are_used_in_place,
    "f015_checkpoints_of_a_batch": saves_follow_each_other,
    "f016_chunks_smaller_than_the_interval": short_chunks_save_nothing,
    "f022_a_checkpoint_beside_decodes": mixed_steps_save_nothing,
    "f036_abort_with_a_hit": an_aborted_slot_leaks,
    "f037_no_checkpoint_can_go": hits_are_not_given_back,
    "f038_no_slot_for_a_checkpoint": a_due_checkpoint_comes_first,
    "f040_hits_are_held_before_room_is_made": room_is_made_before_hits_are_held,
    "f044_where_requests_part": checkpoints_only_at_the_end,
    "f045_a_short_prompt_is_reused": no_checkpoint_in_a_prompt,
    "f047_a_boundary_inside_the_answer": saves_come_a_step_late,
    "f050_an_interval_between_blocks": any_interval_is_taken,
    "f051_checkpoints_are_what_they_say": saves_read_the_null_slot,
    "f052_one_thing_is_evicted": the_head_goes_first,
    "f053_saved_after_the_step": saves_come_before_the_layers,
    "f055_only_what_is_new_is_computed": turns_leave_nothing,
    "f057_kept_while_a_step_runs": memory_is_freed_at_once,
    "f059_retracted_every_three_steps": blocks_alone_are_a_hit,
    "f061_no_feature_turns_another_off": caching_is_switched_off,
    "b010_abort_at_every_boundary": half_a_block_is_kept,
    "b042_as_much_as_is_shared": the_last_blocks_are_forgotten,
    "b043_every_offset": states_are_a_block_off,
    "together_they_compute_it_once": nobody_waits,
}

FURTHER: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("f005_kv_without_a_state", shared_blocks_are_written),
    ("f036_abort_with_a_hit", who_has_left_is_woken),
]
