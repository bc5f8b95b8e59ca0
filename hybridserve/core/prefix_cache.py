"""What a request can begin with of what others have computed, and when. Knows requests and their trails;
does not know budgets, queues or what makes room.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hybridserve.core.prefix_misses import PrefixMisses
from hybridserve.core.prefix_store import PrefixStore
from hybridserve.core.prefix_trails import Match, Trail, plan_cuts
from hybridserve.core.prefix_waits import PrefixWaits
from hybridserve.core.prefix_writes import MAX_CHECKPOINTS, PrefixWrites
from hybridserve.core.slabs import IntegrityError
from hybridserve.core.step import UnitCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hybridserve.core.block_pool import BlockPool
    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.core.compaction import Renaming
    from hybridserve.core.host_tier import HostTier
    from hybridserve.core.plan import StepPlan
    from hybridserve.core.prefix_nodes import Checkpoint, Node
    from hybridserve.core.prefix_store import PrefixCounters
    from hybridserve.core.request import Request
    from hybridserve.core.slot_pool import SlotPool


def _in_arena(path: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes at the beginning of a path whose K and V can be shared."""
    return tuple(itertools.takewhile(lambda node: node.block, path))


class PrefixCache(PrefixStore):
    """The store of prefixes as requests and steps use it.

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
        super().__init__(layout, blocks, slots, host, counters)
        self._enabled = enabled
        self._interval = checkpoint_interval
        self._size = layout.block_size
        self._trails: dict[str, Trail] = {}
        self._reading: dict[int, list[Match]] = {}  # by the step that copies from it
        self._waits = PrefixWaits(self.counters, has_slots=self._has_slots)
        self._writes = PrefixWrites(layout, blocks, slots, self, self._waits)
        self._misses = PrefixMisses(
            self.index.evicted, self._waits, size=self._size, has_blocks=self._has_blocks
        )

    # ---- requests come and go

    def open(self, request: Request) -> None:
        if self._enabled:
            trail = self._trails[request.id] = Trail(request, self.index, self._size)
            trail.extend(trail.limit)
            self._waits.find(trail, 0)  # whoever computes it shall leave a state where they part

    def close(self, request: Request) -> None:
        trail = self._trails.pop(request.id, None)
        if trail is None:
            return
        self._waits.stop(trail)
        self._waits.leave(trail)
        trail.is_open = False
        trail.leave_when_done()

    # ---- admission

    def match(self, request: Request) -> Match:
        """The longest prefix of a waiting request, short of its last token, with K and V and a state that are
        there."""
        trail = self._trails.get(request.id)
        if trail is None or request.params.prompt_logprobs is not None:
            return Match()
        path = trail.path()
        shared = _in_arena(path)
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
        path = trail.path()[: request.num_computed // self._size]
        return Match(request.num_computed, _in_arena(path))

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
        return True

    def holds(self, request: Request) -> bool:
        """Whether a request is out of the queue."""
        trail = self._trails.get(request.id)
        return trail is not None and self._waits.holds(trail)

    def take_woken(self, step_id: int) -> list[Request]:
        """Those that go on: what they waited for is there, or is not going to be, or it took too long."""
        return self._waits.take_woken(step_id)

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
        # what it finds after a preemption may be its own
        trail.first_own = min(first, trail.first_own) if trail.has_begun else first
        trail.turn_from = request.num_tokens
        self._writes.brought_in(trail, match)
        if not trail.has_begun:  # nobody waits behind one that was preempted
            self._waits.announce(trail, trail.nodes[first : trail.limit])
        trail.has_begun = True
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
        self.check(checkpoint, match.num_tokens)
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
        self._writes.brought_in(trail, match)
        self._plan_cuts(trail, match)

    def _plan_cuts(self, trail: Trail, match: Match) -> None:
        if self._has_slots:
            cuts = plan_cuts(trail, match, interval=self._interval, has_blocks=self._has_blocks)
            self._waits.set_cuts(trail, cuts)

    def _count(self, trail: Trail, match: Match) -> None:
        counters, request = self.counters, trail.request
        if request.has_started:
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

    # ---- steps

    def computed(self, request: Request, start: int) -> None:
        """The step that is being planned computes tokens from `start` to `num_computed`, at whose end another
        block is full."""
        if (trail := self._trails.get(request.id)) is not None:
            self._writes.computed(trail, start)

    def save(self, step_id: int, room: Callable[[], bool] | None) -> tuple[UnitCopy, ...]:
        """Step `step_id` is planned: the copies that it ends with. `room`: whether one more slot may be taken
        out of a free slab; None: no slot may be taken at all."""
        return self._writes.save(step_id, room)

    def step_finished(self, step_id: int) -> None:
        for match in self._reading.pop(step_id, ()):
            self.have_read(match)
        self._writes.publish(step_id)

    def stop(self, request: Request) -> None:
        """It loses its memory: it computes nothing any more that others could wait for."""
        if (trail := self._trails.get(request.id)) is not None:
            self._waits.stop(trail)
            trail.unproven.clear()

    def distrust(self, request: Request) -> None:
        """What it has computed is not to be used by anybody who comes, nor what it began with unless others
        have drawn tokens from that: whoever wrote it may be gone."""
        trail = self._trails.get(request.id)
        if trail is not None and (node := trail.suspect()) is not None:
            self.index.void(node)

    def drew(self, requests: Iterable[Request]) -> None:
        """A step that has finished drew a token of each, so their logits were finite."""
        trails = self._trails
        for request in requests:
            if (trail := trails.get(request.id)) is not None and trail.unproven:
                trail.drew()

    def forked(self, child: Request) -> None:
        """A request begins with what its parent has computed."""
        if (trail := self._trails.get(child.id)) is not None:
            trail.has_begun = True
            trail.num_noted = trail.first_own = child.num_computed // self._size
            trail.turn_from = child.num_computed

    # ---- what it holds

    def rename(self, renaming: Renaming) -> None:
        """Units have moved."""
        self.index.rename_blocks(renaming.blocks)
        self._writes.rename_blocks(renaming)
        if not renaming.slots:
            return
        for checkpoint in self._checkpoints():
            if checkpoint.slot in renaming.slots:
                checkpoint.slot = renaming.slots[checkpoint.slot]
                checkpoint.generation = self._slots.generation(checkpoint.slot)

    def _checkpoints(self) -> list[Checkpoint]:
        """In the arena, those that are being written too."""
        kept = [checkpoint for checkpoint in self.index.checkpoints if not checkpoint.is_hosted]
        return kept + self._writes.checkpoints

    @property
    def num_checkpoints(self) -> int:
        """In the arena, with those that are being written."""
        return self.index.num_checkpoints + len(self._writes.checkpoints)

    @property
    def slots(self) -> list[int]:
        """Of all checkpoints in the arena, those that are being written too."""
        return [checkpoint.slot for checkpoint in self._checkpoints()]

    @property
    def pending_blocks(self) -> list[int]:
        """Those that steps in flight, and the one that is planned, add to the tree."""
        return self._writes.blocks

    @property
    def block_references(self) -> list[int]:
        """Each block as often as the cache holds it."""
        return [*self.index.blocks, *self.pending_blocks]

    def check_integrity(self) -> None:
        super().check_integrity()
        if self.index.max_checkpoints_on_a_path() > MAX_CHECKPOINTS:
            raise IntegrityError(f"more than {MAX_CHECKPOINTS} checkpoints on a path")
        self._waits.check_integrity(self._trails.values())
