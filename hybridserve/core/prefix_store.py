"""What is kept of prefixes, in the arena or the host's memory: who holds it, and how it goes. Knows the tree,
blocks and slots; does not know requests, nor what steps are going to add.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridserve.core.host_tier import OWNER
from hybridserve.core.prefix_host import PrefixHost
from hybridserve.core.prefix_index import PrefixIndex
from hybridserve.core.prefix_misses import Miss
from hybridserve.core.prefix_nodes import Cause
from hybridserve.core.slabs import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hybridserve.core.block_pool import BlockPool
    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.core.host_tier import HostTier
    from hybridserve.core.prefix_nodes import Checkpoint, Node
    from hybridserve.core.prefix_trails import Match
    from hybridserve.core.slot_pool import SlotPool


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
    """Prompt tokens of all that were admitted, each prompt once."""
    num_resumed_tokens: int = 0
    """Tokens that sequences did not compute again after a preemption, and that continuations of a prompt
    (n > 1) did not which could not fork."""
    num_unreached_tokens: int = 0
    """Prompt tokens that were computed though K and V were there: no checkpoint."""
    num_checkpoints: int = 0
    num_skipped_checkpoints: int = 0
    """For want of memory."""
    num_evicted_blocks: int = 0
    num_replaced_checkpoints: int = 0
    """Of sequences that generate, by newer ones of their own."""
    num_over_limit_checkpoints: int = 0
    """That went because their path had too many, however much memory there was."""
    num_spilled_blocks: int = 0
    """Of those evicted, what went to the host's memory."""
    num_spilled_checkpoints: int = 0
    num_found_blocks: int = 0
    """That were matched in the host's memory and copied back."""
    num_found_checkpoints: int = 0
    num_vanished_blocks: int = 0
    """That were worth keeping, and for which the host's memory had no room, or has none any more."""
    num_vanished_checkpoints: int = 0
    """Gone for want of memory, from the arena and the host's."""
    num_waits: int = 0
    num_waits_given_up: int = 0


class PrefixStore:
    """Holds a reference to each block of the tree and owns the slots of its checkpoints, as sequences do;
    `evict_block` and `evict_checkpoint` give them back."""

    def __init__(
        self,
        layout: CacheLayout,
        blocks: BlockPool,
        slots: SlotPool,
        host: HostTier,
        counters: PrefixCounters | None = None,
    ) -> None:
        self.index = PrefixIndex(layout)
        self.counters = counters or PrefixCounters()
        self.hosted = PrefixHost(self.index, blocks, slots, host, self.counters)
        self._has_blocks, self._has_slots = layout.blocks_per_slab > 0, layout.slots_per_slab > 0
        self._blocks, self._slots, self._host = blocks, slots, host

    # ---- who holds it

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
        """There was no room: nothing begins with it."""
        self.free(match.blocks)
        self.have_read(match)

    def have_read(self, match: Match) -> None:
        """The step that copied from it has finished."""
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

    def check(self, checkpoint: Checkpoint, num_tokens: int) -> None:
        """That a copy of it would be the state after these tokens (D13)."""
        pool = self.hosted if checkpoint.is_hosted else self._slots
        if checkpoint.num_tokens != num_tokens or checkpoint.generation != pool.generation(checkpoint.slot):
            raise IntegrityError(f"the checkpoint in slot {checkpoint.slot} is not what it was")

    # ---- how it goes

    def evict_block(self) -> bool:
        """Give back a block that nobody holds, with the checkpoint there; False where there is none."""
        node = self.index.first_block
        if node is None:
            return False
        is_kept = self.hosted.keep_block(node)
        if is_kept and node.checkpoint is not None and not node.has_hosted_checkpoint:
            self.hosted.keep_checkpoint(node, OWNER)
        if not node.host_block:  # perhaps it had to make room for its own checkpoint
            self.index.remember_evicted(node)
        block, checkpoint = self.index.take_block(node)
        self._blocks.free([block])
        self.counters.num_evicted_blocks += 1
        if checkpoint is not None:
            self.counters.num_vanished_checkpoints += 1
            self._give_back(checkpoint)
        return True

    def evict_checkpoint(self) -> bool:
        """Give back the slot of a checkpoint that nobody reads; False where there is none."""
        node = self.index.first_checkpoint
        if node is None:
            return False
        self.evict_checkpoint_of(node)
        return True

    def evict_checkpoint_of(self, node: Node) -> None:
        """Its slot is free afterwards."""
        if not self.hosted.keep_checkpoint(node, OWNER):
            self.counters.num_vanished_checkpoints += 1
            if not self._has_blocks:  # with it goes all that is kept of the prefix
                self.index.remember_evicted(node)
            self._give_back(self.index.take_down(node))

    def clear(self) -> None:
        """Keep nothing but what sequences hold or steps in flight use."""
        while self.evict_block() or self.evict_checkpoint():
            pass
        self._host.clear()

    def drop(self, node: Node) -> None:
        """There are too many on a path; nobody reads the one there."""
        self._give_back(self.index.take_down(node))
        self.counters.num_over_limit_checkpoints += 1

    def replace(self, node: Node) -> None:
        """A sequence's former end makes room for its new one."""
        self._give_back(self.index.take_down(node))
        self.counters.num_replaced_checkpoints += 1

    def _give_back(self, checkpoint: Checkpoint) -> None:
        if checkpoint.is_hosted:
            self.hosted.drop_checkpoint(checkpoint)
        else:
            self._slots.free(checkpoint.slot, OWNER)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the tree, and what it says of its units, are right. Costs O(nodes)."""
        self.index.check_integrity()
        for checkpoint in self.index.checkpoints:
            self.check(checkpoint, checkpoint.num_tokens)
        for block in self.index.blocks:
            if self.index.is_pinned(block) != (self._blocks.num_references(block) > 1):
                raise IntegrityError(f"block {block} counts as evictable, or not, against the facts")
