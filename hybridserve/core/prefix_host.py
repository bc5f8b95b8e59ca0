"""What of the tree of prefixes is in the host's memory: how it gets there, who reads it, what goes. Knows
nodes and units of both tiers; does not know steps, nor what is evicted from the arena when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.core.slabs import SlabKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.core.block_pool import BlockPool
    from hybridserve.core.host_tier import HostTier
    from hybridserve.core.prefix_index import PrefixIndex
    from hybridserve.core.prefix_nodes import Checkpoint, Node
    from hybridserve.core.prefix_store import PrefixCounters
    from hybridserve.core.request import Request
    from hybridserve.core.slot_pool import SlotPool


class PrefixHost:
    """Blocks and checkpoints that are on offer in the host's memory, but for those that steps read. A block
    that is in the arena again leaves; a checkpoint stays, as the newest of all."""

    def __init__(
        self,
        index: PrefixIndex,
        blocks: BlockPool,
        slots: SlotPool,
        host: HostTier,
        counters: PrefixCounters,
    ) -> None:
        self._index = index
        self._blocks, self._slots = blocks, slots
        self._host = host
        self._counters = counters
        self._has_blocks = blocks.units_per_slab > 0
        host.forget = self._forget

    # ---- out of the arena

    def keep_block(self, node: Node) -> bool:
        """The block of a node is about to go: whether it is in the host's memory now."""
        if not self._index.is_useful(node) or node.is_void:
            return False
        if not node.host_block:  # else a step in flight reads it there
            node.host_block = self._host.keep(SlabKind.KV, self._blocks.origin(node.block), node)
            if not node.host_block:
                self._counters.num_vanished_blocks += 1
                return False
            self._counters.num_spilled_blocks += 1
        return True

    def keep_checkpoint(self, node: Node, owner: str) -> bool:
        """The checkpoint of a node, in a slot of `owner`, is about to go: whether it is in the host's memory
        now, and its slot is free."""
        checkpoint = node.checkpoint
        assert checkpoint is not None
        slot = 0
        if not node.is_void:
            slot = self._host.keep(SlabKind.STATE, self._slots.origin(checkpoint.slot), node)
        if not slot:
            return False
        self._slots.free(checkpoint.slot, owner)
        self._index.move_to_host(node, slot, self._host.slots.generation(slot))
        self._counters.num_spilled_checkpoints += 1
        return True

    # ---- steps that read

    def hold_blocks(self, nodes: Sequence[Node]) -> None:
        """A step is going to copy them into the arena."""
        for node in nodes:
            node.num_host_readers += 1
            if node.num_host_readers == 1:
                self._host.withdraw(SlabKind.KV, node.host_block)

    def let_blocks_go(self, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):  # the last of a path goes first
            node.num_host_readers -= 1
            if not node.num_host_readers:
                self._host.offer(SlabKind.KV, node.host_block, node)
                self.filled(node)

    def hold_checkpoint(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_readers += 1
        if checkpoint.num_readers == 1:
            self._host.withdraw(SlabKind.STATE, checkpoint.slot)

    def let_checkpoint_go(self, checkpoint: Checkpoint, node: Node) -> None:
        checkpoint.num_readers -= 1
        if not checkpoint.num_readers:
            self._host.offer(SlabKind.STATE, checkpoint.slot, node)

    def generation(self, slot: int) -> int:
        return self._host.slots.generation(slot)

    # ---- out of the host's memory

    def filled(self, node: Node) -> None:
        """If the block of a node is in the arena (again), it is not kept here, but for steps that read it."""
        if node.block and node.host_block and not node.num_host_readers:
            self._host.drop(SlabKind.KV, node.host_block)
            node.host_block = 0

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Of one that was taken down."""
        self._host.drop(SlabKind.STATE, checkpoint.slot)

    def _forget(self, kind: SlabKind, node: Node) -> None:
        if kind is SlabKind.KV:
            node.host_block = 0
            self._counters.num_vanished_blocks += 1
            if not node.block:
                self._index.remember_evicted(node)
            self._index.prune(node)
        else:
            if not self._has_blocks:  # with it goes all that is kept of the prefix
                self._index.remember_evicted(node)
            self._index.take_down(node)
            self._counters.num_vanished_checkpoints += 1

    # ---- checks

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise IntegrityError unless the tree and `requests` hold what is in use. Costs O(nodes)."""
        nodes = list(self._index.nodes)
        blocks = {node.host_block: node for node in nodes if node.host_block}
        slots = {
            node.checkpoint.slot: node
            for node in nodes
            if node.checkpoint is not None and node.has_hosted_checkpoint
        }
        self._host.check_integrity(requests, blocks, slots)
