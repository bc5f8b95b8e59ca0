"""What each sequence holds of the arena and of the host's memory, and what is kept for later ones. Knows
blocks, slots and steps in flight; does not know budgets or policies."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from hybridserve.core.block_pool import BlockPool
from hybridserve.core.compaction import Compactor
from hybridserve.core.host_tier import OWNER, Held, HostTier
from hybridserve.core.prefix_cache import PrefixCache
from hybridserve.core.slabs import IntegrityError, SlabAllocator
from hybridserve.core.slot_pool import SlotPool
from hybridserve.core.step import UnitCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.core.compaction import CompactionCounters, Renaming
    from hybridserve.core.plan import StepPlan
    from hybridserve.core.prefix_store import PrefixCounters
    from hybridserve.core.prefix_trails import Match
    from hybridserve.core.request import Request
    from hybridserve.core.step import UnitCopies


class ForkCopies(NamedTuple):
    state: tuple[UnitCopy, ...]
    blocks: tuple[UnitCopy, ...]


class CacheUsage(NamedTuple):
    """Units and bytes in use, of what can be handed out: the null slab is not counted, the padding of a unit
    is. What is kept of prefixes is in use, and evictable unless a sequence or a step holds it as well."""

    num_blocks: int
    num_slots: int
    num_slabs: int
    num_block_slabs: int
    num_slot_slabs: int
    num_usable_slabs: int
    num_bytes: int
    num_usable_bytes: int
    num_cached_blocks: int
    """Of those in use, blocks that nobody but the prefix cache holds."""
    num_checkpoints: int
    """Of the slots in use, those that hold one."""
    num_live_bytes: int
    """Of those in use, what sequences hold."""

    @property
    def utilisation(self) -> float:
        """The share that sequences hold: the rest can be had."""
        return self.num_live_bytes / self.num_usable_bytes


class CacheManager:
    """Gives sequences blocks and slots, all or nothing, and takes them back once no step can write them (D5).

    Only blocks that are not full are written, and a fork copies such a one: shared blocks are read-only. What
    the prefix cache holds, and nobody else, is evicted when there is no other room; what is left is moved
    together where a slab of the other kind is needed. So while room is made, units change their numbers:
    those of requests, of the prefix cache, and of the plan that `begin_step` named. Whoever keeps a number
    besides asks again afterwards.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_host_slabs: int = 0,
        prefix_caching: bool = False,
        checkpoint_interval: int = 0,
        counters: PrefixCounters | None = None,
        compaction_counters: CompactionCounters | None = None,
    ) -> None:
        if layout.num_slabs < 2:
            raise ValueError(f"num_slabs: {layout.num_slabs} leaves nothing beside the null slab")
        self.layout = layout
        self.slabs = SlabAllocator(layout.num_slabs)
        self.blocks = BlockPool(self.slabs, layout.blocks_per_slab)
        self.slots = SlotPool(self.slabs, layout.slots_per_slab)
        self.host = HostTier(layout, num_host_slabs)
        self.prefix = PrefixCache(
            layout,
            self.blocks,
            self.slots,
            self.host,
            enabled=prefix_caching,
            checkpoint_interval=checkpoint_interval,
            counters=counters,
        )
        self.compactor = Compactor(layout, self.blocks, self.slots, compaction_counters)
        self.finished_step = -1
        self._deferred: dict[int, list[Held]] = {}  # by the step that may still write it
        self._holders: dict[Request, None] = {}  # requests that have memory
        self._plan: StepPlan | None = None
        self._moved: dict[str, None] = {}

    def blocks_needed(self, request: Request, num_tokens: int) -> int:
        """Blocks that `request` lacks to hold `num_tokens` tokens."""
        num_blocks = len(request.block_ids)
        if num_tokens <= num_blocks * self.layout.block_size:
            return 0
        return self.layout.blocks_for(num_tokens) - num_blocks

    def fits(self, num_blocks: int, num_slots: int) -> bool:
        """Whether so many units could be handed out now, together."""
        return self._num_missing(num_blocks, num_slots) <= 0

    def _num_missing(self, num_blocks: int, num_slots: int) -> int:
        """Slabs that would have to be emptied before so many units could be handed out."""
        slabs = self.blocks.slabs_needed(num_blocks)
        if self.layout.slots_per_slab:
            slabs += self.slots.slabs_needed(num_slots)
        return slabs - self.slabs.num_free

    def make_room(self, num_blocks: int, num_slots: int) -> bool:
        """`fits`, after evicting as little as that takes, and moving what is left together; nothing is lost
        where all would not be enough. False as well where it takes more moves than a step may make."""
        if self.fits(num_blocks, num_slots):
            return True
        index = self.prefix.index
        blocks, slots = num_blocks - index.num_evictable_blocks, num_slots - index.num_evictable_slots
        if self._num_spare(blocks, slots) < 0:
            return False
        while self._num_spare(num_blocks, num_slots) < 0:
            if not self._evict(wants_block=num_blocks > self.blocks.num_open):
                return False
        return self.fits(num_blocks, num_slots) or self._compact(num_blocks, num_slots)

    def _num_spare(self, num_blocks: int, num_slots: int) -> int:
        """Slabs that would be empty if so many units more were in use and all lay together; below 0, those
        that are missing. What is evictable can be had by taking it off."""
        spare = self.blocks.slabs_to_spare(num_blocks) + self.slots.slabs_to_spare(num_slots)
        return self.slabs.num_free + spare

    def _evict(self, *, wants_block: bool) -> bool:
        """Blocks that save nothing, then units of the kind that is missing, then of the other: they may empty
        a slab."""
        prefix = self.prefix
        if wants_block or prefix.index.has_useless_block:
            return prefix.evict_block() or prefix.evict_checkpoint()
        return prefix.evict_checkpoint() or prefix.evict_block()

    def _compact(self, num_blocks: int, num_slots: int) -> bool:
        """Empty the slabs that are missing, which is possible, and tell whoever holds something of them."""
        missing = self._num_missing(num_blocks, num_slots)
        renaming = self.compactor.empty_slabs(missing, num_blocks, num_slots)
        if renaming.blocks or renaming.slots:
            self._rename(renaming)
        return self.fits(num_blocks, num_slots)

    def _rename(self, renaming: Renaming) -> None:
        for request in self._holders:
            blocks, slot = renaming.of_blocks(request.block_ids), renaming.of_slot(request.state_slot)
            if blocks is not request.block_ids or slot != request.state_slot:
                request.block_ids, request.state_slot = blocks, slot
                self._moved[request.id] = None
        for group in self._deferred.values():
            group[:] = [
                Held(renaming.of_blocks(blocks), renaming.of_slot(slot), owner)
                for blocks, slot, owner in group
            ]
        self.prefix.rename(renaming)
        if self._plan is not None:
            self._plan.rename(renaming)

    def begin_step(self, plan: StepPlan) -> None:
        """From now on it is this plan whose copies are about units that may move."""
        self._plan = plan
        self.compactor.is_held_up = False

    def take_moves(self) -> tuple[UnitCopies, tuple[str, ...]]:
        """For the step that is frozen: its moves, and the ids of the requests whose memory they move."""
        moved, self._moved = tuple(self._moved), {}
        return self.compactor.take_moves(), moved

    def admit(self, request: Request, match: Match, num_blocks: int, plan: StepPlan) -> bool:
        """Let a waiting request start, or go on, in the step that is planned with what was matched, if
        `num_blocks` more blocks and a slot could be had; False, and nothing has changed but what was evicted,
        where not."""
        prefix = self.prefix
        prefix.hold(match)
        if not self.make_room(num_blocks, 1):
            prefix.let_go(match)
            return False
        self._holders[request] = None
        request.block_ids = match.blocks
        self.reserve(request, max(match.num_tokens, len(match.shared) * self.layout.block_size))
        if request.is_swapped_out:
            self._swap_in(request, match, plan)
        else:
            prefix.begin(request, match, plan)
        return True

    def swap_out(self, request: Request) -> bool:
        """Plan to copy what `request` has computed to the host's memory, before it is released; False where
        there is no room."""
        blocks = request.block_ids[: self.layout.blocks_for(request.num_computed)]
        slot = request.state_slot
        sources = [self.blocks.origin(block) for block in blocks]
        return self.host.swap_out(request, sources, slot and self.slots.origin(slot))

    def swapped_bytes(self, request: Request, num_shared: int = 0) -> int:
        """K and V of what `request` has computed, but for its first `num_shared` blocks, and its state."""
        num_blocks = self.layout.blocks_for(request.num_computed) - num_shared
        return num_blocks * self.layout.block_stride + self.layout.slot_stride

    def _swap_in(self, request: Request, match: Match, plan: StepPlan) -> None:
        """Of what `request` needs, K and V of `match` are there already, in blocks that it shares."""
        pairs = zip(request.host_block_ids, request.block_ids, strict=True)
        plan.block_swaps_in += [UnitCopy(*pair) for pair in pairs][len(match.shared) :]
        if request.host_slot:
            plan.state_swaps_in.append(UnitCopy(request.host_slot, request.state_slot))
        self.host.release(request, plan.step_id)
        self.prefix.go_on(request, match)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Give `request` blocks for its first `num_tokens` tokens, and a slot; or nothing (False)."""
        num_blocks = self.blocks_needed(request, num_tokens)
        needs_slot = self.layout.slots_per_slab > 0 and not request.state_slot
        if not num_blocks and not needs_slot:
            return True
        if not self.make_room(num_blocks, int(needs_slot)):
            return False
        self._holders[request] = None
        if num_blocks:
            request.block_ids += self.blocks.allocate(num_blocks) or ()
        if needs_slot:
            request.state_slot = self.slots.allocate(request.id) or 0
        return True

    def release(self, request: Request) -> None:
        """Take back all that `request` holds: at once, or when the newest step with it has finished."""
        if not request.block_ids and not request.state_slot:
            return
        del self._holders[request]
        held = Held(request.block_ids, request.state_slot, request.id)
        request.block_ids, request.state_slot, request.write_from = (), 0, 0
        if request.last_step > self.finished_step:
            self._deferred.setdefault(request.last_step, []).append(held)
        else:
            self._free(held)

    def plan_saves(
        self, step_id: int, promised: Callable[[], int], *, is_starved: bool
    ) -> tuple[UnitCopy, ...]:
        """A step is planned: the states that it saves. `promised`: blocks that the running sequences lack for
        what is known of them; a checkpoint takes none of their room."""
        once = functools.cache(promised)  # O(running), and few steps need it
        return self.prefix.save(step_id, None if is_starved else lambda: self._has_slab_for(once()))

    def _has_slab_for(self, num_promised: int) -> bool:
        """Whether one more slot would fit beside the promised blocks; what is useless makes room for it."""
        while not self.fits(num_promised, 1):
            if not self.prefix.index.has_useless_block:
                return False
            self.prefix.evict_block()
        return True

    def step_finished(self, step_id: int) -> None:
        """Nothing up to and including this step runs any more."""
        self.finished_step = step_id
        self.prefix.step_finished(step_id)
        self.host.step_finished(step_id)
        for step in [step for step in self._deferred if step <= step_id]:
            for held in self._deferred.pop(step):
                self._free(held)

    def _free(self, held: Held) -> None:
        self.prefix.free(held.blocks)
        if held.slot:
            self.slots.free(held.slot, held.owner)

    def is_short_of(self, num_blocks: int) -> bool:
        """Whether `num_blocks` could not be had, wherever they lie, even after the steps in flight have
        finished: then somebody has to give something up."""
        deferred = [held for group in self._deferred.values() for held in group]
        transient = Counter(self.prefix.pending_blocks)
        for held in deferred:
            transient.update(held.blocks)
        index, num_references = self.prefix.index, self.blocks.num_references
        # Nobody will hold those but perhaps the tree.
        left = [unit for unit, count in transient.items() if num_references(unit) == count + (unit in index)]
        coming = index.num_evictable_without(left) + sum(unit not in index for unit in left)
        num_slots = self.prefix.num_checkpoints + sum(held.slot > 0 for held in deferred)
        return self._num_spare(num_blocks - coming, -num_slots) < 0

    def fork(self, parent: Request, child: Request) -> ForkCopies | None:
        """Let `child`, which holds nothing, continue from what `parent` has computed; None changes nothing.

        Full blocks are shared. The child gets one block of its own, a copy of the parent's partial block or,
        at a block's end, an empty one, so that its next token always fits; and a copy of the state.
        """
        has_blocks, has_slot = self.layout.blocks_per_slab > 0, self.layout.slots_per_slab > 0
        if not self.make_room(int(has_blocks), int(has_slot)):
            return None
        state: tuple[UnitCopy, ...] = ()
        blocks: tuple[UnitCopy, ...] = ()
        self._holders[child] = None
        child.num_computed = parent.num_computed
        self.prefix.forked(child)
        if has_blocks:
            num_full, num_partial = divmod(parent.num_computed, self.layout.block_size)
            shared, own = parent.block_ids[:num_full], self.blocks.allocate(1) or ()
            self.blocks.share(shared)
            child.block_ids = shared + own
            if num_partial:
                blocks = (UnitCopy(parent.block_ids[num_full], own[0]),)
        if has_slot:
            child.state_slot = self.slots.allocate(child.id) or 0
            state = (UnitCopy(parent.state_slot, child.state_slot),)
        return ForkCopies(state, blocks)

    def bytes_by_kind(self) -> dict[str, int]:
        """What the arena, without the null slab, is used for; "fragmented": free units of slabs in use."""
        block, slot = self.layout.block_stride, self.layout.slot_stride
        num_cached, num_checkpoints = self.prefix.index.num_evictable_blocks, self.prefix.num_checkpoints
        return {
            "kv_live": (self.blocks.num_used - num_cached) * block,
            "kv_cached": num_cached * block,
            "state_live": (self.slots.num_used - num_checkpoints) * slot,
            "checkpoints": num_checkpoints * slot,
            "fragmented": self.blocks.num_open * block + self.slots.num_open * slot,
            "free": self.slabs.num_free * self.layout.slab_bytes,
        }

    def usage(self) -> CacheUsage:
        layout, kinds = self.layout, self.bytes_by_kind()
        return CacheUsage(
            num_blocks=self.blocks.num_used,
            num_slots=self.slots.num_used,
            num_slabs=self.slabs.num_usable - self.slabs.num_free,
            num_block_slabs=self.blocks.num_slabs,
            num_slot_slabs=self.slots.num_slabs,
            num_usable_slabs=self.slabs.num_usable,
            num_bytes=self.blocks.num_used * layout.block_stride + self.slots.num_used * layout.slot_stride,
            num_usable_bytes=self.slabs.num_usable * layout.slab_bytes,
            num_cached_blocks=self.prefix.index.num_evictable_blocks,
            num_checkpoints=self.prefix.num_checkpoints,
            num_live_bytes=kinds["kv_live"] + kinds["state_live"],
        )

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise IntegrityError unless `requests`, with what waits for a step, hold exactly what the pools
        gave out."""
        references: Counter[int] = Counter()
        owners: dict[int, str] = {}
        requests = list(requests)
        held = [Held(request.block_ids, request.state_slot, request.id) for request in requests]
        for blocks, slot, owner in held + [entry for group in self._deferred.values() for entry in group]:
            references.update(blocks)
            if slot:
                if slot in owners:
                    raise IntegrityError(f"slot {slot} is held by {owners[slot]!r} and {owner!r}")
                owners[slot] = owner
        if {request for request in requests if request.block_ids or request.state_slot} != set(self._holders):
            raise IntegrityError("a request has memory that it would not be told of when it moves")
        references.update(self.prefix.block_references)
        for slot in self.prefix.slots:
            if slot in owners:
                raise IntegrityError(f"slot {slot} holds a checkpoint and is held by {owners[slot]!r}")
            owners[slot] = OWNER
        self.prefix.check_integrity()
        self.prefix.hosted.check_integrity(requests)
        self.slabs.check_integrity()
        self.blocks.check_integrity(references)
        self.slots.check_integrity(owners)
        for request in requests:
            if not request.block_ids and not request.state_slot:
                continue
            if len(request.block_ids) < self.layout.blocks_for(request.num_computed):
                raise IntegrityError(f"request {request.id!r} has computed more tokens than its blocks hold")
            first = max(request.num_computed, request.write_from) // self.layout.block_size
            own = request.block_ids[first:]
            if any(self.blocks.num_references(block) != 1 for block in own):
                raise IntegrityError(f"request {request.id!r} would write to a shared block")
