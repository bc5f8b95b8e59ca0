"""What is kept of sequences for others that begin alike: when it may be used, and what steps add to it. Knows
requests, blocks and slots; does not know budgets, queues or what makes room.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridserve.core.eviction import priority
from hybridserve.core.host_tier import OWNER
from hybridserve.core.prefix_host import PrefixHost
from hybridserve.core.prefix_index import PrefixIndex
from hybridserve.core.prefix_misses import Miss, PrefixMisses
from hybridserve.core.prefix_nodes import Cause, Checkpoint, Node
from hybridserve.core.prefix_trails import Match, Trail, block_key, plan_cuts
from hybridserve.core.prefix_waits import PrefixWaits
from hybridserve.core.slabs import IntegrityError
from hybridserve.core.step import UnitCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hybridserve.core.block_pool import BlockPool
    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.core.compaction import Renaming
    from hybridserve.core.host_tier import HostTier
    from hybridserve.core.plan import StepPlan
    from hybridserve.core.request import Request
    from hybridserve.core.slot_pool import SlotPool

MAX_CHECKPOINTS = 8
"""On one path."""


@dataclass(slots=True)
class PrefixCounters:
    num_hits: int = 0
    hit_tokens: dict[str, int] = field(
        default_factory=lambda: {**dict.fromkeys([str(cause) for cause in Cause], 0), "blocks": 0}
    )
    """Prompt tokens that were not computed, by why the checkpoint was where they end; "blocks": there was no
    need of one."""
    missed_tokens: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys([str(miss) for miss in Miss], 0)
    )
    """Prompt tokens that were computed, by why they had to be: with the others, all that were queried."""
    num_queried_tokens: int = 0
    """Prompt tokens of all that were admitted."""
    num_resumed_tokens: int = 0
    """Tokens that sequences did not compute again after a preemption."""
    num_unreached_tokens: int = 0
    """Prompt tokens that were computed though K and V were there: no checkpoint."""
    num_checkpoints: int = 0
    num_skipped_checkpoints: int = 0
    """For want of memory."""
    num_evicted_blocks: int = 0
    num_evicted_checkpoints: int = 0
    num_replaced_checkpoints: int = 0
    """Of sequences that generate, by newer ones of their own."""
    num_spilled_blocks: int = 0
    """Of those evicted, what went to the host's memory."""
    num_spilled_checkpoints: int = 0
    num_found_blocks: int = 0
    """That were matched in the host's memory and copied back."""
    num_found_checkpoints: int = 0
    num_vanished_blocks: int = 0
    """That were worth keeping, and for which the host's memory had no room, or has none any more."""
    num_vanished_checkpoints: int = 0
    num_waits: int = 0
    num_waits_given_up: int = 0


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


class PrefixCache:
    """Holds references to blocks and owns slots, as sequences do; `evict` gives them back.

    A request is `open`ed when it comes and `close`d when it ends. `match` says what it can begin with, `wait`
    whether it should rather wait; `begin` when it starts, `computed` whenever a step computes some of it,
    `stop` when it loses its memory. `save` ends the planning of a step, `step_finished` publishes what the
    step did. Not `enabled`: nothing is ever found or kept.
    """

    def __init__(
        self,
        layout: CacheLayout,
        blocks: BlockPool,
        slots: SlotPool,
        host: HostTier,
        *,
        enabled: bool,
        checkpoint_interval: int,
        counters: PrefixCounters | None = None,
    ) -> None:
        self.index = PrefixIndex(layout)
        self.counters = counters or PrefixCounters()
        self.hosted = PrefixHost(self.index, blocks, slots, host, self.counters)
        self._enabled = enabled
        self._interval = checkpoint_interval
        self._layout = layout
        self._size = layout.block_size
        self._has_blocks, self._has_slots = layout.blocks_per_slab > 0, layout.slots_per_slab > 0
        self._blocks = blocks
        self._slots = slots
        self._host = host
        self._trails: dict[str, Trail] = {}
        self._planned: list[_Pending] = []
        self._pending: dict[int, list[_Pending]] = {}
        self._reading: dict[int, list[Match]] = {}
        self._waits = PrefixWaits(self._size, has_slots=self._has_slots)
        self._misses = PrefixMisses(
            self.index.evicted, self._waits, size=self._size, has_blocks=self._has_blocks
        )

    # ---- requests come and go

    def open(self, request: Request) -> None:
        if self._enabled:
            trail = Trail(request, self.index.root(request.cache_salt))
            self._trails[request.id] = trail
            self._extend(trail, trail.limit(self._size))
            self._waits.find(trail, 0)  # whoever computes it shall leave a state where they part

    def close(self, request: Request) -> None:
        trail = self._trails.pop(request.id, None)
        if trail is None:
            return
        self._waits.stop(trail)
        self._waits.leave(trail)
        trail.is_open = False
        self._leave_when_done(trail)

    def _leave_when_done(self, trail: Trail) -> None:
        if not trail.is_open and not trail.num_pending:
            self.index.leave([trail.root, *trail.nodes])

    def _extend(self, trail: Trail, num_blocks: int) -> None:
        for place in range(len(trail.nodes), num_blocks):
            parent = trail.nodes[-1] if place else trail.root
            key = block_key(trail.request, place, self._size)
            trail.nodes.append(self.index.child(parent, key, (place + 1) * self._size))

    # ---- admission

    def match(self, request: Request) -> Match:
        """The longest prefix of a waiting request, short of its last token, with K and V and a state that are
        there."""
        trail = self._trails.get(request.id)
        if trail is None or request.params.prompt_logprobs is not None:
            return Match()
        path = self._path(trail)
        shared = self._in_arena(path)
        nodes = list(path)
        if self._has_blocks:
            del nodes[len(shared) :]
            nodes += itertools.takewhile(lambda node: node.host_block, path[len(shared) :])
        while self._has_slots and nodes and nodes[-1].checkpoint is None:
            nodes.pop()
        if not nodes:
            return Match(0, shared)
        hosted = tuple(nodes[len(shared) :]) if self._has_blocks else ()
        return Match(nodes[-1].num_tokens, shared, nodes[-1], hosted)

    def match_again(self, request: Request) -> Match:
        """What a sequence that was swapped out and goes on need not copy back: K and V of its own tokens."""
        trail = self._trails.get(request.id)
        if trail is None:
            return Match(request.num_computed)
        path = self._path(trail)[: request.num_computed // self._size]
        return Match(request.num_computed, self._in_arena(path))

    def _path(self, trail: Trail) -> list[Node]:
        """The nodes that a waiting request could begin after, as others find them."""
        void = next((place for place, node in enumerate(trail.nodes) if node.is_void), None)
        if void is not None:
            self.index.leave(trail.nodes[void:])
            del trail.nodes[void:]
        limit = trail.limit(self._size)
        self._extend(trail, limit)
        return trail.nodes[:limit]

    def _in_arena(self, path: Sequence[Node]) -> tuple[Node, ...]:
        """The nodes at the beginning of a path whose K and V can be shared."""
        return tuple(itertools.takewhile(lambda node: node.block, path))

    def wait(self, request: Request, match: Match, step_id: int) -> bool:
        """Whether a running request is about to compute what this one needs next: then it is out of the queue
        until `take_woken` returns it."""
        trail = self._trails.get(request.id)
        if trail is None or not trail.may_wait or request.params.prompt_logprobs is not None:
            return False
        node = self._waits.find(trail, match.num_tokens)
        if node is None:
            return False
        self._waits.wait(trail, node, step_id)
        self.counters.num_waits += 1
        return True

    def holds(self, request: Request) -> bool:
        """Whether a request is out of the queue."""
        trail = self._trails.get(request.id)
        return trail is not None and self._waits.holds(trail)

    def take_woken(self, step_id: int) -> list[Request]:
        """Those that go on: what they waited for is there, or is not going to be, or it took too long."""
        woken = self._waits.take_woken(step_id)
        self.counters.num_waits_given_up += self._waits.take_given_up()
        return woken

    def hold(self, match: Match) -> None:
        """Keep what was matched while room is made for the rest."""
        for block in match.blocks:
            if self._blocks.num_references(block) == 1:
                self.index.pin(block)
        self._blocks.share(match.blocks)
        self.hosted.hold_blocks(match.hosted)
        if match.node is not None and (checkpoint := match.node.checkpoint) is not None:
            if checkpoint.is_hosted:
                self.hosted.hold_checkpoint(checkpoint)
            else:
                self.index.hold(checkpoint, match.node)

    def let_go(self, match: Match) -> None:
        self.free(match.blocks)
        self._have_read(match)

    def _have_read(self, match: Match) -> None:
        self.hosted.let_blocks_go(match.hosted)
        if match.node is not None and (checkpoint := match.node.checkpoint) is not None:
            if checkpoint.is_hosted:
                self.hosted.let_checkpoint_go(checkpoint, match.node)
            else:
                self.index.let_go(checkpoint, match.node)

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference, not of the cache's own, to each block."""
        for block in self._blocks.free(blocks):
            self.index.unpin(block)

    def begin(self, request: Request, match: Match, plan: StepPlan) -> None:
        """A request starts in the step that is planned with what `hold` has kept for it, blocks of its own
        for what is in the host's memory, and a slot: the step begins with the copies."""
        request.num_computed = match.num_tokens
        request.write_from = match.num_blocks * self._size
        trail = self._trails.get(request.id)
        if trail is None:
            return
        self.index.clock += 1
        self._count(trail, match)
        first = match.num_tokens // self._size
        trail.first_own = first
        trail.turn_from = request.num_tokens
        self._bring_in(trail, match)
        if not request.num_preemptions:  # nobody waits behind one that was preempted
            self._waits.announce(trail, trail.nodes[first : trail.limit(self._size)])
        self._plan_cuts(trail, match)
        if match.node is None:
            return
        self.index.touch(match.node)
        self._reading.setdefault(plan.step_id, []).append(match)
        own = request.block_ids[len(match.shared) : match.num_blocks]
        plan.block_swaps_in += [
            UnitCopy(node.host_block, block) for node, block in zip(match.hosted, own, strict=True)
        ]
        self.counters.num_found_blocks += len(match.hosted)
        checkpoint = match.node.checkpoint
        if checkpoint is None:
            return
        self._check(checkpoint, match.num_tokens)
        copy = UnitCopy(checkpoint.slot, request.state_slot)
        if checkpoint.is_hosted:
            plan.state_swaps_in.append(copy)
            self.counters.num_found_checkpoints += 1
        else:
            plan.state_copies.append(copy)

    def go_on(self, request: Request, match: Match) -> None:
        """A sequence that was swapped out has memory again, and what is in it."""
        if (trail := self._trails.get(request.id)) is None:
            return
        self.index.clock += 1
        trail.turn_from = request.num_tokens
        self._bring_in(trail, match)
        self._plan_cuts(trail, match)

    def _bring_in(self, trail: Trail, match: Match) -> None:
        """The full blocks that a sequence has with the step that is planned are for others too, when it has
        finished."""
        first, end = len(match.shared), match.num_tokens // self._size
        trail.num_noted = max(first, end)
        if blocks := trail.request.block_ids[first:end]:
            self._blocks.share(blocks)
            trail.num_pending += 1
            end *= self._size
            self._planned.append(_Pending(trail, end, end, first, blocks, None))

    def _plan_cuts(self, trail: Trail, match: Match) -> None:
        if self._has_slots:
            cuts = plan_cuts(
                trail, match, size=self._size, interval=self._interval, has_blocks=self._has_blocks
            )
            self._waits.set_cuts(trail, cuts)

    def _count(self, trail: Trail, match: Match) -> None:
        counters, request = self.counters, trail.request
        if request.num_preemptions:
            counters.num_resumed_tokens += match.num_tokens
            return
        request.num_cached = match.num_tokens
        counters.num_queried_tokens += request.num_prompt
        counters.num_unreached_tokens += max(0, request.write_from - match.num_tokens)
        for miss, num_tokens in self._misses.of(trail, match):
            counters.missed_tokens[miss] += num_tokens
        if match.node is not None:
            checkpoint = match.node.checkpoint
            counters.num_hits += 1
            counters.hit_tokens[checkpoint.cause if checkpoint else "blocks"] += match.num_tokens

    def _check(self, checkpoint: Checkpoint, num_tokens: int) -> None:
        """That a copy of it would be the state after these tokens (D13)."""
        pool = self.hosted if checkpoint.is_hosted else self._slots
        if checkpoint.num_tokens != num_tokens or checkpoint.generation != pool.generation(checkpoint.slot):
            raise IntegrityError(f"the checkpoint in slot {checkpoint.slot} is not what it was")

    # ---- steps

    def computed(self, request: Request, start: int) -> None:
        """The step that is being planned computes tokens from `start` to `num_computed`, at whose end another
        block is full."""
        trail = self._trails.get(request.id)
        if trail is None:
            return
        end = request.num_computed
        num_full, first = end // self._size, trail.num_noted
        blocks = request.block_ids[first:num_full]
        self._blocks.share(blocks)
        trail.num_noted = max(first, num_full)
        trail.num_pending += 1
        cause = self._waits.take_cut(trail, end)
        if cause is None and self._has_slots and end >= trail.turn_from and not end % self._size:
            cause = Cause.TURN
        self._planned.append(_Pending(trail, start, end, first, blocks, cause))

    def save(self, step_id: int, room: Callable[[], bool] | None) -> tuple[UnitCopy, ...]:
        """Step `step_id` is planned: the copies that it ends with. `room`: whether one more slot may be taken
        out of a free slab; None: no slot may be taken at all."""
        planned, self._planned = self._planned, []
        if not planned:
            return ()
        self._pending[step_id] = planned
        saves = []
        for pending in planned:
            if pending.cause is None:
                continue
            slot = self._slot_for(pending, room) if room else 0
            if not slot:
                self.counters.num_skipped_checkpoints += 1
                continue
            generation = self._slots.generation(slot)
            pending.checkpoint = Checkpoint(
                pending.end, slot, generation, step_id, pending.cause, self.index.clock
            )
            saves.append(UnitCopy(pending.trail.request.state_slot, slot))
        return tuple(saves)

    def _slot_for(self, pending: _Pending, room: Callable[[], bool]) -> int:
        """0 where there is none, or only for something that is worth more."""
        if not self._slots.num_open and not room():
            turn = pending.trail.turn
            if turn is not None and self._is_superseded(turn) and not turn.has_hosted_checkpoint:
                self._replace(turn)
            elif (first := self.index.first_checkpoint) is not None:
                if self.index.checkpoint_priority(first) >= self._priority(pending):
                    return 0
                self._evict_checkpoint(first)
            if not self._slots.num_open:
                return 0
        return self._slots.allocate(OWNER) or 0

    def _priority(self, pending: _Pending) -> tuple[bool, float]:
        """Of a checkpoint that is to be taken."""
        nodes = pending.trail.nodes[: pending.end // self._size - 1]
        above = next((node.num_tokens for node in reversed(nodes) if node.checkpoint is not None), 0)
        return priority(pending.end - above, self._layout.slot_stride, self.index.clock)

    def _is_superseded(self, node: Node) -> bool:
        """Whether a sequence's former end is of no more use to anybody else than the new one."""
        checkpoint = node.checkpoint
        return (
            checkpoint is not None
            and checkpoint.cause is Cause.TURN
            and not checkpoint.num_hits
            and not checkpoint.num_readers
        )

    def step_finished(self, step_id: int) -> None:
        for match in self._reading.pop(step_id, ()):
            self._have_read(match)
        for pending in self._pending.pop(step_id, ()):
            self._publish(pending)

    def _publish(self, pending: _Pending) -> None:
        trail, first = pending.trail, pending.first_block
        # the last token drawn of a sequence that has been aborted is never known
        num_known = min(pending.end, trail.request.num_known) // self._size if trail.is_trusted else 0
        self._extend(trail, num_known)
        for place, block in enumerate(pending.blocks, start=first):
            parent = trail.nodes[place - 1] if 0 < place <= len(trail.nodes) else trail.root
            if place < num_known and not trail.nodes[place].block and (parent.block or not place):
                held = self._blocks.num_references(block) > 1
                self.index.fill(trail.nodes[place], block, is_held=held)
                self.hosted.filled(trail.nodes[place])
            else:  # somebody else was first
                self._blocks.free([block])
        if pending.checkpoint is not None:
            self._publish_checkpoint(trail, pending.checkpoint, num_known)
        self._waits.computed(trail, trail.nodes[pending.start // self._size : pending.end // self._size])
        trail.num_pending -= 1
        self._leave_when_done(trail)

    def _publish_checkpoint(self, trail: Trail, checkpoint: Checkpoint, num_known: int) -> None:
        place = checkpoint.num_tokens // self._size - 1
        node = trail.nodes[place] if place < num_known else None
        if node is None or node.checkpoint is not None or (self._has_blocks and not node.block):
            self._slots.free(checkpoint.slot, OWNER)
            return
        self._check(checkpoint, node.num_tokens)
        self.index.hang(node, checkpoint)
        self.counters.num_checkpoints += 1
        if checkpoint.cause is Cause.TURN:
            if trail.turn is not None and self._is_superseded(trail.turn):
                self._replace(trail.turn)
            trail.turn = node
        while len(path := self.index.checkpoints_around(node)) > MAX_CHECKPOINTS:
            idle = [one for one in path if one.checkpoint is not None and not one.checkpoint.num_readers]
            # the newest saves few tokens, but the next turn begins there
            older = [one for one in idle if one is not node]
            self._drop(min(older or idle, key=self.index.checkpoint_priority))

    def stop(self, request: Request) -> None:
        """It loses its memory: it computes nothing any more that others could wait for."""
        if (trail := self._trails.get(request.id)) is not None:
            self._waits.stop(trail)

    def distrust(self, request: Request) -> None:
        """What it has computed is not to be used by anybody who comes."""
        trail = self._trails.get(request.id)
        if trail is None:
            return
        trail.is_trusted = False
        for node in trail.nodes[trail.first_own :]:
            if node.block or node.host_block or node.checkpoint is not None:
                self.index.void(node)
                return

    def forked(self, child: Request) -> None:
        """A request begins with what its parent has computed."""
        if (trail := self._trails.get(child.id)) is not None:
            trail.num_noted = child.num_computed // self._size
            trail.turn_from = child.num_computed

    # ---- memory

    def evict_block(self) -> bool:
        """Give back a block that nobody holds, with the checkpoint there; False where there is none."""
        node = self.index.first_block
        if node is None:
            return False
        is_kept = self.hosted.keep_block(node)
        if not is_kept:
            self.index.remember_evicted(node)
        if is_kept and node.checkpoint is not None and not node.has_hosted_checkpoint:
            self._keep_checkpoint(node)
        block, checkpoint = self.index.take_block(node)
        self._blocks.free([block])
        self.counters.num_evicted_blocks += 1
        if checkpoint is not None:
            self.counters.num_vanished_checkpoints += 1
            self._free_checkpoint(checkpoint)
        return True

    def evict_checkpoint(self) -> bool:
        """Give back the slot of a checkpoint that nobody reads; False where there is none."""
        node = self.index.first_checkpoint
        if node is None:
            return False
        self._evict_checkpoint(node)
        return True

    def _evict_checkpoint(self, node: Node) -> None:
        if not self._keep_checkpoint(node):
            self.counters.num_vanished_checkpoints += 1
            if not self._has_blocks:  # with it goes all that is kept of the prefix
                self.index.remember_evicted(node)
            self._drop(node)

    def _keep_checkpoint(self, node: Node) -> bool:
        is_kept = self.hosted.keep_checkpoint(node, OWNER)
        self.counters.num_evicted_checkpoints += is_kept
        return is_kept

    def clear(self) -> None:
        """Keep nothing but what sequences hold or steps in flight use."""
        while self.evict_block() or self.evict_checkpoint():
            pass
        self._host.clear()

    def rename(self, renaming: Renaming) -> None:
        """Units have moved."""
        self.index.rename_blocks(renaming.blocks)
        for pending in self._all_pending():
            pending.blocks = renaming.of_blocks(pending.blocks)
        if not renaming.slots:
            return
        for checkpoint in self._all_checkpoints():
            if checkpoint.slot in renaming.slots:
                checkpoint.slot = renaming.slots[checkpoint.slot]
                checkpoint.generation = self._slots.generation(checkpoint.slot)

    def _drop(self, node: Node) -> None:
        self._free_checkpoint(self.index.take_down(node))

    def _replace(self, node: Node) -> None:
        """A sequence's former end makes room for its new one."""
        self._give_back(self.index.take_down(node))
        self.counters.num_replaced_checkpoints += 1

    def _free_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._give_back(checkpoint)
        self.counters.num_evicted_checkpoints += 1

    def _give_back(self, checkpoint: Checkpoint) -> None:
        if checkpoint.is_hosted:
            self.hosted.drop_checkpoint(checkpoint)
        else:
            self._slots.free(checkpoint.slot, OWNER)

    def _all_pending(self) -> Iterator[_Pending]:
        yield from self._planned
        for group in self._pending.values():
            yield from group

    @property
    def num_checkpoints(self) -> int:
        """In the arena, with those that are being written."""
        return self.index.num_checkpoints + sum(one.checkpoint is not None for one in self._all_pending())

    def _all_checkpoints(self) -> Iterator[Checkpoint]:
        """In the arena, those that are being written too."""
        yield from (checkpoint for checkpoint in self.index.checkpoints if not checkpoint.is_hosted)
        for pending in self._all_pending():
            if pending.checkpoint is not None:
                yield pending.checkpoint

    @property
    def slots(self) -> list[int]:
        """Of all checkpoints in the arena, those that are being written too."""
        return [checkpoint.slot for checkpoint in self._all_checkpoints()]

    @property
    def pending_blocks(self) -> list[int]:
        """Those that steps in flight, and the one that is planned, add to the tree."""
        return [block for one in self._all_pending() for block in one.blocks]

    @property
    def block_references(self) -> list[int]:
        """Each block as often as the cache holds it."""
        return [*self.index.blocks, *self.pending_blocks]

    def check_integrity(self) -> None:
        self.index.check_integrity()
        for checkpoint in self.index.checkpoints:
            self._check(checkpoint, checkpoint.num_tokens)
        if self.index.max_checkpoints_on_a_path() > MAX_CHECKPOINTS:
            raise IntegrityError(f"more than {MAX_CHECKPOINTS} checkpoints on a path")
        for block in self.index.blocks:
            if self.index.is_pinned(block) != (self._blocks.num_references(block) > 1):
                raise IntegrityError(f"block {block} counts as evictable, or not, against the facts")
        self._waits.check_integrity(self._trails.values())
