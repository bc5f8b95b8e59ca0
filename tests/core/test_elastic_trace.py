"""An arena under load that swings between many short sequences and few long ones: nobody waits, sits out or
is preempted while what is free and what could go would hold it, wherever that lies.

What could be had is counted here from who holds what, not from what the pools say of themselves.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.core.block_pool import BlockPool
from hybridserve.core.cache_manager import CacheManager
from hybridserve.core.compaction import Renaming
from hybridserve.core.plan import StepPlan
from hybridserve.core.prefix_cache import PrefixCache
from hybridserve.core.prefix_trails import Match
from hybridserve.core.slabs import IntegrityError, UnitPool
from tests.harness.scripted import ScriptedEngine, toy_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridserve.core.cache_spec import CacheLayout

MAX_MODEL_LEN = 250
LAYOUTS = {"two": (2, 1), "six": (2, 3)}
"""Slots of a slab: those of a toy's slab, and how many of these make one."""


def layout_of(name: str, num_slabs: int) -> CacheLayout:
    slots_per_slab, times = LAYOUTS[name]
    layout = toy_layout(num_slabs, slots_per_slab=slots_per_slab)
    return dataclasses.replace(
        layout,
        slots_per_slab=times * layout.slots_per_slab,
        blocks_per_slab=times * layout.blocks_per_slab,
        slab_bytes=times * layout.slab_bytes,
    )


class Witness:
    """Looks on while an engine makes room, and contradicts each refusal that was not needed."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine, self.layout = engine, engine.layout
        self.num_refusals = self.num_short = 0
        self._match: Match | None = None
        cache = engine.scheduler.cache
        self._make_room, self._is_short_of, self._admit = cache.make_room, cache.is_short_of, cache.admit
        cache.make_room, cache.is_short_of, cache.admit = self.make_room, self.is_short_of, self.admit

    def admit(self, request: Any, match: Match, *rest: Any) -> Any:
        self._match = match
        try:
            return self._admit(request, match, *rest)
        finally:
            self._match = None

    def make_room(self, num_blocks: int, num_slots: int) -> bool:
        is_there = self._make_room(num_blocks, num_slots)
        if not is_there:
            self.num_refusals += 1
            blocks, slots = self.held(in_flight=True)
            assert not self.would_hold(len(blocks) + num_blocks, len(slots) + num_slots), "refused needlessly"
        return is_there

    def is_short_of(self, num_blocks: int) -> bool:
        is_short = self._is_short_of(num_blocks)
        blocks, slots = self.held(in_flight=False)
        if is_short:
            self.num_short += 1
            assert not self.would_hold(len(blocks) + num_blocks, len(slots)), "preempted needlessly"
        else:
            assert self.would_hold(len(blocks) + num_blocks, len(slots)), "waits for what never comes"
        return is_short

    def would_hold(self, num_blocks: int, num_slots: int) -> bool:
        slabs = -(-num_blocks // self.layout.blocks_per_slab) + -(-num_slots // self.layout.slots_per_slab)
        return slabs <= self.layout.num_usable_slabs

    def held(self, *, in_flight: bool) -> tuple[set[int], set[int]]:
        """Blocks and slots that can't go; `in_flight`: nor those that can't go before a step has finished."""
        scheduler = self.engine.scheduler
        cache, prefix = scheduler.cache, scheduler.cache.prefix
        blocks: set[int] = set()
        slots: set[int] = set()
        # parents that have ended are not among the scheduler's requests
        for request in {*scheduler.requests.values(), *cache._holders}:
            blocks |= set(request.block_ids)
            slots.add(request.state_slot)
        if self._match is not None:
            blocks |= set(self._match.blocks)
            checkpoint = self._match.node.checkpoint if self._match.node is not None else None
            slots.add(checkpoint.slot if checkpoint and not checkpoint.is_hosted else 0)
        if in_flight:
            for group in cache._deferred.values():
                for held in group:
                    blocks |= set(held.blocks)
                    slots.add(held.slot)
            for pending in prefix._writes._all():
                blocks |= set(pending.blocks)
                slots.add(pending.checkpoint.slot if pending.checkpoint else 0)
            for match in (match for group in prefix._reading.values() for match in group):
                checkpoint = match.node.checkpoint
                slots.add(checkpoint.slot if checkpoint and not checkpoint.is_hosted else 0)
        for block in list(blocks):  # a block below needs those above it
            node = prefix.index._by_block.get(block)
            while node is not None:
                blocks.add(node.block)
                node = node.parent
        return blocks - {0}, slots - {0}

    def check_usage(self) -> None:
        cache, layout = self.engine.scheduler.cache, self.layout
        kinds, usage = cache.bytes_by_kind(), cache.usage()
        assert sum(kinds.values()) == usage.num_usable_bytes
        blocks, slots = self.held(in_flight=True)
        assert kinds["kv_live"] == len(blocks) * layout.block_stride
        live_slots = slots - set(cache.prefix.slots)
        assert kinds["state_live"] == len(live_slots) * layout.slot_stride
        assert usage.num_live_bytes == kinds["kv_live"] + kinds["state_live"]
        in_use = {(block // layout.blocks_per_slab) for block in cache.prefix.block_references}
        in_use |= {block // layout.blocks_per_slab for block in blocks}
        in_use |= {slot // layout.slots_per_slab for slot in (*live_slots, *cache.prefix.slots)}
        assert kinds["free"] == (layout.num_usable_slabs - len(in_use)) * layout.slab_bytes


def run_trace(
    seed: int,
    num_steps: int,
    *,
    layout: str = "two",
    num_slabs: int = 20,
    depth: int = 2,
    caching: bool = True,
    num_host_slabs: int = 0,
    preemption: str = "auto",
    look: Callable[[ScriptedEngine, Witness], None] | None = None,
) -> ScriptedEngine:
    """Many short sequences come for a while, then a few long ones, and so on."""
    rng = random.Random(seed)
    engine = ScriptedEngine(
        layout_of(layout, num_slabs),
        depth,
        max_num_seqs=48,
        max_num_batched_tokens=160,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=caching,
        num_host_slabs=num_host_slabs,
        preemption=preemption,
        swap_bytes_per_token=100,
        checkpoint_interval=rng.choice([0, 16, 40]),
    )
    witness = Witness(engine)
    longest = min(MAX_MODEL_LEN, engine.layout.max_tokens_one_sequence() or 0) - 60
    systems = [[rng.randrange(31) for _ in range(rng.randint(8, 40))] for _ in range(3)]
    prompts: list[list[int]] = []
    for step in range(num_steps):
        is_long = step // 15 % 2
        num_waiting = engine.scheduler.num_waiting
        for _ in range(rng.random() < 0.2 if is_long else rng.randint(0, 3) * (num_waiting < 12)):
            prompt = list(rng.choice(prompts[-20:])) if prompts and rng.random() < 0.3 else []
            prompt = prompt or rng.choice(systems) * (rng.random() < 0.6)
            prompt = prompt + [rng.randrange(31) for _ in range(rng.randint(1, 12))]
            if is_long:
                prompt += [rng.randrange(31) for _ in range(rng.randrange(longest // 2, longest))]
            prompt = prompt[:longest]
            engine.add(
                f"r{len(engine.requests)}-{step}",
                prompt,
                n=1 if is_long else rng.choice([1, 1, 1, 2, 3]),
                max_tokens=rng.randint(1, 10 if is_long else 40),
                ignore_eos=True,
            )
            prompts.append(prompt)
        if rng.random() < 0.3 and engine.scheduler.requests:
            engine.abort(rng.choice(sorted(engine.scheduler.requests)))
        engine.step()
        engine.scheduler.check_integrity()
        witness.check_usage()
    engine.run()
    if look is not None:
        look(engine, witness)
    engine.check_outputs()
    engine.check_drained()
    return engine


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_host_slabs", [0, 6])
def test_nobody_waits_for_memory_that_is_there(layout: str, caching: bool, num_host_slabs: int) -> None:
    def look(engine: ScriptedEngine, witness: Witness) -> None:
        scheduler = engine.scheduler
        assert scheduler.cache.compactor.counters.num_compacted_slabs
        assert scheduler.cache.compactor.counters.num_moved_bytes
        assert witness.num_refusals  # it was short indeed
        assert bool(scheduler.counters.num_swaps_out) == (num_host_slabs > 0)

    run_trace(
        1,
        120,
        layout=layout,
        num_slabs=9 if layout == "six" else 20,
        caching=caching,
        num_host_slabs=num_host_slabs,
        preemption="swap" if num_host_slabs else "recompute",
        look=look,
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_nobody_waits_for_memory_that_is_there_for_long(layout: str, depth: int, caching: bool) -> None:
    for seed in range(100, 106):
        rng = random.Random(seed)
        run_trace(
            seed,
            600,
            layout=layout,
            num_slabs=rng.randint(8, 20),
            depth=depth,
            caching=caching,
            num_host_slabs=rng.choice([0, 3, 20]),
            preemption=rng.choice(["auto", "swap", "recompute"]),
        )


def _checkpoints_stay_where_they_were(patch: pytest.MonkeyPatch) -> None:
    plain = PrefixCache.rename
    patch.setattr(PrefixCache, "rename", lambda self, renaming: plain(self, Renaming(renaming.blocks, {})))


def _blocks_of_steps_in_flight_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "rename", lambda self, renaming: self.index.rename_blocks(renaming.blocks))


def _the_plan_copies_from_where_it_was(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPlan, "rename", lambda self, renaming: None)


def _units_move_within_their_slab(patch: pytest.MonkeyPatch) -> None:
    """Into its own open units first; the slab changes its use all the same."""

    def empty_slab(self: UnitPool) -> dict[int, int]:
        size, room = self.units_per_slab, self._rooms.bit_length() - 1
        slab = next(iter(self._by_room[room]))
        self._discard(slab, room)
        free = self._free.pop(slab)
        units = [unit for unit in range(slab * size, (slab + 1) * size) if unit not in set(free)]
        self.num_used -= len(units)
        to = (free + self._take(len(units)))[: len(units)]
        self.slabs.free(slab)
        moved = dict(zip(units, to, strict=True))
        for unit, new in moved.items():
            self._moves[new] = self._moves.pop(unit, unit)
            self._rename(unit, new)
        return moved

    patch.setattr(UnitPool, "empty_slab", empty_slab)


def _references_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_rename", lambda self, unit, new: self._references.setdefault(new, 1))


def _hits_are_called_what_they_were(patch: pytest.MonkeyPatch) -> None:
    """While room is made for the rest, what was found moves (F040)."""
    found: list[tuple[Match, tuple[int, ...]]] = []

    def blocks(self: Match) -> tuple[int, ...]:
        if not found or found[-1][0] is not self:
            found.append((self, tuple(node.block for node in self.shared)))
        return found[-1][1]

    patch.setattr(Match, "blocks", property(blocks))


def _only_empty_slabs_change_their_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheManager, "_compact", lambda self, num_blocks, num_slots: False)


def _only_blocks_count_as_coming(patch: pytest.MonkeyPatch) -> None:
    def is_short_of(self: CacheManager, num_blocks: int) -> bool:
        coming = sum(len(held.blocks) for group in self._deferred.values() for held in group)
        return num_blocks > self.blocks.num_free + self.prefix.index.num_evictable_blocks + coming

    patch.setattr(CacheManager, "is_short_of", is_short_of)


@pytest.mark.parametrize(
    "fault",
    [
        _checkpoints_stay_where_they_were,
        _blocks_of_steps_in_flight_stay,
        _the_plan_copies_from_where_it_was,
        _units_move_within_their_slab,
        _references_stay,
        _hits_are_called_what_they_were,
        _only_empty_slabs_change_their_use,
        _only_blocks_count_as_coming,
    ],
)
def test_the_trace_sees(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError, KeyError)):
        [run_trace(seed, 120) for seed in range(4)]
