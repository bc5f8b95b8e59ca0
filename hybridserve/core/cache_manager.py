"""What each sequence holds of the arena. Knows blocks, slots and steps in flight; does not know budgets or
policies."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from hybridserve.core.block_pool import BlockPool
from hybridserve.core.slabs import IntegrityError, SlabAllocator
from hybridserve.core.slot_pool import SlotPool
from hybridserve.core.step import UnitCopy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.core.request import Request


class ForkCopies(NamedTuple):
    state: tuple[UnitCopy, ...]
    blocks: tuple[UnitCopy, ...]


class CacheUsage(NamedTuple):
    """Units and bytes in use, of what can be handed out: the null slab is not counted, the padding of a unit
    is."""

    num_blocks: int
    num_slots: int
    num_slabs: int
    num_block_slabs: int
    num_slot_slabs: int
    num_usable_slabs: int
    num_bytes: int
    num_usable_bytes: int

    @property
    def utilisation(self) -> float:
        return self.num_bytes / self.num_usable_bytes


class _Deferred(NamedTuple):
    """Memory of a sequence that is gone but that a step in flight may still write."""

    blocks: tuple[int, ...]
    slot: int
    owner: str


class CacheManager:
    """Gives sequences blocks and slots, all or nothing, and takes them back once no step can write them (D5).

    Only blocks that are not full are written, and a fork copies such a one: shared blocks are read-only.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.slabs = SlabAllocator(layout.num_slabs)
        self.blocks = BlockPool(self.slabs, layout.blocks_per_slab)
        self.slots = SlotPool(self.slabs, layout.slots_per_slab)
        self.finished_step = -1
        self._deferred: dict[int, list[_Deferred]] = {}

    def blocks_needed(self, request: Request, num_tokens: int) -> int:
        """Blocks that `request` lacks to hold `num_tokens` tokens."""
        num_blocks = len(request.block_ids)
        if num_tokens <= num_blocks * self.layout.block_size:
            return 0
        return self.layout.blocks_for(num_tokens) - num_blocks

    def fits(self, num_blocks: int, num_slots: int) -> bool:
        """Whether so many units could be handed out now, together."""
        slabs = self.blocks.slabs_needed(num_blocks)
        if self.layout.slots_per_slab:
            slabs += self.slots.slabs_needed(num_slots)
        return slabs <= self.slabs.num_free

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Give `request` blocks for its first `num_tokens` tokens, and a slot; or nothing (False)."""
        num_blocks = self.blocks_needed(request, num_tokens)
        needs_slot = self.layout.slots_per_slab > 0 and not request.state_slot
        if not num_blocks and not needs_slot:
            return True
        if not self.fits(num_blocks, int(needs_slot)):
            return False
        if num_blocks:
            request.block_ids += self.blocks.allocate(num_blocks) or ()
        if needs_slot:
            request.state_slot = self.slots.allocate(request.id) or 0
        return True

    def release(self, request: Request) -> None:
        """Take back all that `request` holds: at once, or when the newest step with it has finished."""
        if not request.block_ids and not request.state_slot:
            return
        held = _Deferred(request.block_ids, request.state_slot, request.id)
        request.block_ids, request.state_slot = (), 0
        if request.last_step > self.finished_step:
            self._deferred.setdefault(request.last_step, []).append(held)
        else:
            self._free(held)

    def step_finished(self, step_id: int) -> None:
        """Nothing up to and including this step runs any more."""
        self.finished_step = step_id
        for step in [step for step in self._deferred if step <= step_id]:
            for held in self._deferred.pop(step):
                self._free(held)

    def _free(self, held: _Deferred) -> None:
        self.blocks.free(held.blocks)
        if held.slot:
            self.slots.free(held.slot, held.owner)

    def is_short_of(self, num_blocks: int) -> bool:
        """Whether `num_blocks` could not be had even after the steps in flight have finished."""
        coming = sum(len(held.blocks) for group in self._deferred.values() for held in group)
        return num_blocks > self.blocks.num_free + coming

    def fork(self, parent: Request, child: Request) -> ForkCopies | None:
        """Let `child`, which holds nothing, continue from what `parent` has computed; None changes nothing.

        Full blocks are shared. The child gets one block of its own, a copy of the parent's partial block or,
        at a block's end, an empty one, so that its next token always fits; and a copy of the state.
        """
        has_blocks, has_slot = self.layout.blocks_per_slab > 0, self.layout.slots_per_slab > 0
        if not self.fits(int(has_blocks), int(has_slot)):
            return None
        state: tuple[UnitCopy, ...] = ()
        blocks: tuple[UnitCopy, ...] = ()
        child.num_computed = parent.num_computed
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

    def usage(self) -> CacheUsage:
        layout = self.layout
        return CacheUsage(
            num_blocks=self.blocks.num_used,
            num_slots=self.slots.num_used,
            num_slabs=self.slabs.num_usable - self.slabs.num_free,
            num_block_slabs=self.blocks.num_slabs,
            num_slot_slabs=self.slots.num_slabs,
            num_usable_slabs=self.slabs.num_usable,
            num_bytes=self.blocks.num_used * layout.block_stride + self.slots.num_used * layout.slot_stride,
            num_usable_bytes=self.slabs.num_usable * layout.slab_bytes,
        )

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise IntegrityError unless `requests`, with what waits for a step, hold exactly what the pools
        gave out."""
        references: Counter[int] = Counter()
        owners: dict[int, str] = {}
        requests = list(requests)
        held = [_Deferred(request.block_ids, request.state_slot, request.id) for request in requests]
        for blocks, slot, owner in held + [entry for group in self._deferred.values() for entry in group]:
            references.update(blocks)
            if slot:
                if slot in owners:
                    raise IntegrityError(f"slot {slot} is held by {owners[slot]!r} and {owner!r}")
                owners[slot] = owner
        self.slabs.check_integrity()
        self.blocks.check_integrity(references)
        self.slots.check_integrity(owners)
        for request in requests:
            if not request.block_ids and not request.state_slot:
                continue
            if len(request.block_ids) < self.layout.blocks_for(request.num_computed):
                raise IntegrityError(f"request {request.id!r} has computed more tokens than its blocks hold")
            own = request.block_ids[request.num_computed // self.layout.block_size :]
            if any(self.blocks.num_references(block) != 1 for block in own):
                raise IntegrityError(f"request {request.id!r} would write to a shared block")
