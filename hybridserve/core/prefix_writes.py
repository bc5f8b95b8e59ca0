"""What steps add to the tree of prefixes: planned, in flight, published. Knows trails, blocks and slots; does
not know who may use what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridserve.core.eviction import priority, rank_on_path
from hybridserve.core.host_tier import OWNER
from hybridserve.core.prefix_nodes import Cause, Checkpoint
from hybridserve.core.step import UnitCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hybridserve.core.block_pool import BlockPool
    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.core.compaction import Renaming
    from hybridserve.core.prefix_nodes import Node
    from hybridserve.core.prefix_store import PrefixStore
    from hybridserve.core.prefix_trails import Match, Trail
    from hybridserve.core.prefix_waits import PrefixWaits
    from hybridserve.core.slot_pool import SlotPool

MAX_CHECKPOINTS = 8
"""On one path."""


@dataclass(slots=True, eq=False)
class _Pending:
    """What a step in flight adds to the tree."""

    trail: Trail
    start: int
    end: int
    first_block: int
    blocks: tuple[int, ...]
    cause: Cause | None
    checkpoint: Checkpoint | None = None


class PrefixWrites:
    """`computed` and `brought_in` note what the step that is planned will have filled, `save` what of it gets
    a checkpoint. `publish` hangs all that up when the step has finished; until then nobody finds it."""

    def __init__(
        self, layout: CacheLayout, blocks: BlockPool, slots: SlotPool, store: PrefixStore, waits: PrefixWaits
    ) -> None:
        self._layout = layout
        self._size = layout.block_size
        self._has_blocks, self._has_slots = layout.blocks_per_slab > 0, layout.slots_per_slab > 0
        self._blocks, self._slots = blocks, slots
        self._store, self._index = store, store.index
        self._waits = waits
        self._planned: list[_Pending] = []
        self._in_flight: dict[int, list[_Pending]] = {}

    # ---- planned

    def brought_in(self, trail: Trail, match: Match) -> None:
        """The full blocks that a sequence has with the step that is planned are for others too, when it has
        finished."""
        first, end = len(match.shared), match.num_tokens // self._size
        trail.num_noted = max(first, end)
        trail.begins_with(match)
        if blocks := trail.request.block_ids[first:end]:
            self._note(_Pending(trail, end * self._size, end * self._size, first, blocks, None))

    def computed(self, trail: Trail, start: int) -> None:
        """The step that is being planned computes tokens from `start` to `num_computed`, at whose end another
        block is full."""
        end = trail.request.num_computed
        num_full, first = end // self._size, trail.num_noted
        blocks = trail.request.block_ids[first:num_full]
        trail.num_noted = max(first, num_full)
        cause = self._waits.take_cut(trail, end)
        if cause is None and self._has_slots and end >= trail.turn_from and not end % self._size:
            cause = Cause.TURN
        self._note(_Pending(trail, start, end, first, blocks, cause))

    def _note(self, pending: _Pending) -> None:
        self._blocks.share(pending.blocks)
        pending.trail.num_pending += 1
        self._planned.append(pending)

    def save(self, step_id: int, room: Callable[[], bool] | None) -> tuple[UnitCopy, ...]:
        """Step `step_id` is planned: the copies that it ends with. `room`: whether one more slot may be taken
        out of a free slab; None: no slot may be taken at all."""
        planned, self._planned = self._planned, []
        if not planned:
            return ()
        self._in_flight[step_id] = planned
        saves = []
        for pending in planned:
            if pending.cause is None:
                continue
            slot = self._slot_for(pending, room) if room else 0
            if not slot:
                self._store.counters.num_skipped_checkpoints += 1
                continue
            generation = self._slots.generation(slot)
            pending.checkpoint = Checkpoint(
                pending.end, slot, generation, step_id, pending.cause, self._index.clock
            )
            saves.append(UnitCopy(pending.trail.request.state_slot, slot))
        return tuple(saves)

    def _slot_for(self, pending: _Pending, room: Callable[[], bool]) -> int:
        """0 where there is none, or only for something that is worth more."""
        if not self._slots.num_open and not room():
            turn = pending.trail.turn
            if turn is not None and self._is_superseded(turn) and not turn.has_hosted_checkpoint:
                self._store.replace(turn)
            elif (first := self._index.first_checkpoint) is not None:
                if self._index.checkpoint_priority(first) >= self._priority(pending):
                    return 0
                self._store.evict_checkpoint_of(first)
            if not self._slots.num_open and not room():
                return 0
        return self._slots.allocate(OWNER) or 0

    def _priority(self, pending: _Pending) -> tuple[bool, float]:
        """Of a checkpoint that is to be taken."""
        nodes = pending.trail.nodes[: pending.end // self._size - 1]
        above = next((node.num_tokens for node in reversed(nodes) if node.checkpoint is not None), 0)
        return priority(pending.end - above, self._layout.slot_stride, self._index.clock)

    def _is_superseded(self, node: Node) -> bool:
        """Whether a sequence's former end is of no more use to anybody else than the new one."""
        checkpoint = node.checkpoint
        return (
            checkpoint is not None
            and checkpoint.cause is Cause.TURN
            and not checkpoint.num_hits
            and not checkpoint.num_readers
        )

    # ---- published

    def publish(self, step_id: int) -> None:
        """A step has finished."""
        for pending in self._in_flight.pop(step_id, ()):
            self._publish(pending)

    def _publish(self, pending: _Pending) -> None:
        trail, first = pending.trail, pending.first_block
        # the last token drawn of a sequence that has been aborted is never known
        num_known = min(pending.end, trail.request.num_known) // self._size if trail.is_trusted else 0
        trail.extend(num_known)
        for place, block in enumerate(pending.blocks, start=first):
            parent = trail.nodes[place - 1] if 0 < place <= len(trail.nodes) else trail.root
            if place < num_known and not trail.nodes[place].block and (parent.block or not place):
                held = self._blocks.num_references(block) > 1
                self._index.fill(trail.nodes[place], block, is_held=held)
                self._store.hosted.filled(trail.nodes[place])
                trail.unproven.append(trail.nodes[place])
            else:  # somebody else was first
                self._blocks.free([block])
        if pending.checkpoint is not None:
            self._publish_checkpoint(trail, pending.checkpoint, num_known)
        self._waits.computed(trail, trail.nodes[pending.start // self._size : pending.end // self._size])
        trail.num_pending -= 1
        trail.leave_when_done()

    def _publish_checkpoint(self, trail: Trail, checkpoint: Checkpoint, num_known: int) -> None:
        place = checkpoint.num_tokens // self._size - 1
        node = trail.nodes[place] if place < num_known else None
        if node is None or node.checkpoint is not None or (self._has_blocks and not node.block):
            self._slots.free(checkpoint.slot, OWNER)
            return
        self._store.check(checkpoint, node.num_tokens)
        self._index.hang(node, checkpoint)
        self._store.counters.num_checkpoints += 1
        trail.unproven.append(checkpoint)
        if checkpoint.cause is Cause.TURN:
            if trail.turn is not None and self._is_superseded(trail.turn):
                self._store.replace(trail.turn)
            trail.turn = node
        while len(path := self._index.checkpoints_around(node)) > MAX_CHECKPOINTS:
            idle = [one for one in path if one.checkpoint is not None and not one.checkpoint.num_readers]
            # the newest and the path's last save few tokens, but the next turn begins there
            last = max(path, key=lambda one: one.num_tokens)
            older = [one for one in idle if one is not node and one is not last]
            self._store.drop(min(older or idle, key=self._rank))

    def _rank(self, node: Node) -> tuple[int, bool, tuple[bool, float]]:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        is_end = checkpoint.cause in (Cause.PROMPT, Cause.TURN)
        return rank_on_path(len(node.children), is_end, self._index.checkpoint_priority(node))

    # ---- until then

    def rename_blocks(self, renaming: Renaming) -> None:
        for pending in self._all():
            pending.blocks = renaming.of_blocks(pending.blocks)

    @property
    def blocks(self) -> list[int]:
        """Each as often as it is held for the tree."""
        return [block for pending in self._all() for block in pending.blocks]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Those that are being written."""
        return [pending.checkpoint for pending in self._all() if pending.checkpoint is not None]

    def _all(self) -> Iterator[_Pending]:
        yield from self._planned
        for group in self._in_flight.values():
            yield from group
