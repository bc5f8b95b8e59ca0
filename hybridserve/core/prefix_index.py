"""A radix tree over blocks of tokens: what has been computed of which prefix, and what of it may go. Knows
ids and counts of blocks and slots; does not own them, and does not know requests.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hybridserve.core.eviction import priority
from hybridserve.core.lazy_heap import LazyHeap
from hybridserve.core.prefix_misses import EvictedPaths
from hybridserve.core.prefix_nodes import Node
from hybridserve.core.slabs import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.core.eviction import Priority
    from hybridserve.core.prefix_nodes import Checkpoint


class PrefixIndex:
    """What hangs in it belongs to the one who hung it there, and who gets it back from `take_block` and
    `take_down`; `first_block` and `first_checkpoint` are the next to go.

    Blocks are there for a path's whole beginning or not at all. A block is evictable while nobody else holds
    it or one below it; `pin` and `unpin` say so. A checkpoint is, while no step in flight reads it. Finding
    the next to go costs O(log n) in what is evictable, however much is not. What is in the host's memory
    hangs here as well, anywhere; when it goes is for others to say (`core/prefix_host.py`).
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._bytes_per_token = layout.block_stride // layout.block_size
        self._top = Node(None, b"", 0)
        self._by_block: dict[int, Node] = {}
        self._leaves = LazyHeap[Node](self._leaf_priority)
        self._idle = LazyHeap[Node](self.checkpoint_priority)
        self._checkpointed: dict[Node, None] = {}
        self._num_void = 0
        self.evicted = EvictedPaths()
        self._num_hosted = 0  # checkpoints
        self.num_evictable_blocks = 0
        self.clock = 0
        """Admissions so far."""

    @property
    def num_checkpoints(self) -> int:
        """In the arena."""
        return len(self._checkpointed) - self._num_hosted

    @property
    def num_evictable_slots(self) -> int:
        return len(self._idle)

    @property
    def blocks(self) -> Iterator[int]:
        return iter(self._by_block)

    @property
    def checkpoints(self) -> Iterator[Checkpoint]:
        """In the arena or not."""
        return (node.checkpoint for node in self._checkpointed if node.checkpoint is not None)

    @property
    def nodes(self) -> Iterator[Node]:
        """All of them. Costs O(nodes)."""
        todo = [self._top]
        while todo:
            node = todo.pop()
            todo += node.children.values()
            yield node

    # ---- paths

    def root(self, salt: str | None) -> Node:
        """Where the paths of requests with this salt begin; one more user of it."""
        return self.child(self._top, b"" if salt is None else b"\x01" + salt.encode(), 0)

    def child(self, parent: Node, key: bytes, num_tokens: int) -> Node:
        """The node of the block `key` after `parent`; one more user of it."""
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, num_tokens)
        node.num_users += 1
        return node

    def leave(self, nodes: Sequence[Node]) -> None:
        """One user fewer of each node of a path."""
        for node in nodes:
            node.num_users -= 1
        self.prune(nodes[-1])

    def prune(self, node: Node) -> None:
        """Something that hung there is gone."""
        while node.parent is not None and node.is_bare:
            del node.parent.children[node.key]
            node = node.parent

    def void(self, node: Node) -> None:
        """Nobody is to find a node any more, nor what follows it; it goes like everything else."""
        assert node.parent is not None
        del node.parent.children[node.key]
        self._num_void += 1
        node.is_void, node.key = True, b"void %d" % self._num_void
        node.parent.children[node.key] = node

    # ---- blocks

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def rename_blocks(self, moved: Mapping[int, int]) -> None:
        """Blocks have moved. All are taken out before any is put back, as one may be where another was."""
        nodes = [(new, self._by_block.pop(block)) for block, new in moved.items() if block in self._by_block]
        for new, node in nodes:
            node.block = new
            self._by_block[new] = node

    def num_evictable_without(self, blocks: Iterable[int]) -> int:
        """Blocks that would be evictable if nobody else held these, which somebody does now or not."""
        count, gone = self.num_evictable_blocks, Counter[Node]()
        for block in blocks:
            node = self._by_block.get(block)
            while node is not None and node.pins:
                gone[node] += 1
                if gone[node] < node.pins:
                    break
                count += node.block > 0
                node = node.parent
        return count

    def fill(self, node: Node, block: int, *, is_held: bool) -> None:
        """Hang up a block; `is_held`: somebody else holds it as well."""
        assert node.parent is not None
        node.block, node.last_used, node.is_proven = block, self.clock, False
        self._by_block[block] = node
        self.num_evictable_blocks += 1
        node.parent.num_filled += 1
        if node.parent.num_filled == 1 and node.parent.block and not node.parent.pins:
            self._leaves.remove(node.parent)
        self._file_leaf(node)
        if is_held:
            self._pin(node)

    def pin(self, block: int) -> None:
        """Somebody else holds a block now, perhaps one of those here."""
        if (node := self._by_block.get(block)) is not None:
            self._pin(node)

    def unpin(self, block: int) -> None:
        """Nobody else holds it any more."""
        if (node := self._by_block.get(block)) is not None:
            self._unpin(node)

    def _pin(self, node: Node | None) -> None:
        while node is not None:
            node.pins += 1
            if node.pins > 1:
                return
            if node.block:
                self.num_evictable_blocks -= 1
                if not node.num_filled:
                    self._leaves.remove(node)
            node = node.parent

    def _unpin(self, node: Node | None) -> None:
        while node is not None:
            node.pins -= 1
            if node.pins:
                return
            if node.block:
                self.num_evictable_blocks += 1
                self._file_leaf(node)
            node = node.parent

    def _file_leaf(self, node: Node) -> None:
        if node.block and not node.pins and not node.num_filled:
            self._leaves.put(node)

    # ---- checkpoints

    def hang(self, node: Node, checkpoint: Checkpoint) -> None:
        node.checkpoint = checkpoint
        self._checkpointed[node] = None
        self._file_checkpoint(node)
        self._file_leaf(node)

    def take_down(self, node: Node) -> Checkpoint:
        """Of a checkpoint, in the arena or not, that nobody reads."""
        checkpoint = self._take_from(node)
        self._file_leaf(node)
        self.prune(node)
        return checkpoint

    def move_to_host(self, node: Node, slot: int, generation: int) -> None:
        """The checkpoint of a node, which nobody reads, is in a slot of the host's memory now."""
        checkpoint = node.checkpoint
        assert checkpoint is not None
        self._idle.remove(node)
        checkpoint.slot, checkpoint.generation, checkpoint.is_hosted = slot, generation, True
        self._num_hosted += 1
        one: Node | None = node
        while one is not None:
            one.num_hosted += 1
            if one.num_hosted > 1:
                break
            one = one.parent
        self._file_leaf(node)

    def _leave_host(self, node: Node) -> None:
        one: Node | None = node
        while one is not None:
            one.num_hosted -= 1
            if one.num_hosted:
                return
            self._file_leaf(one)
            one = one.parent

    def hold(self, checkpoint: Checkpoint, node: Node) -> None:
        """A step is going to read it, in the arena."""
        checkpoint.num_readers += 1
        if checkpoint.num_readers == 1:
            self._idle.remove(node)

    def let_go(self, checkpoint: Checkpoint, node: Node) -> None:
        checkpoint.num_readers -= 1
        if not checkpoint.num_readers:
            self._file_checkpoint(node)

    def touch(self, node: Node) -> None:
        """It was hit: it, and nothing above it, is as new."""
        node.last_used = self.clock
        if node.checkpoint is not None:
            node.checkpoint.last_used = self.clock
            node.checkpoint.num_hits += 1

    def above(self, node: Node) -> Node | None:
        """The nearest checkpoint above a node."""
        one = node.parent
        while one is not None and one.checkpoint is None:
            one = one.parent
        return one

    def checkpoints_around(self, node: Node) -> list[Node]:
        """Nodes with a checkpoint on the path through `node` that has most of them."""
        found: list[Node] = []
        one: Node | None = node
        while one is not None:
            if one.checkpoint is not None:
                found.append(one)
            one = one.parent
        most: list[Node] = []
        todo: list[tuple[Node, list[Node]]] = [(child, []) for child in node.children.values()]
        while todo:
            below, path = todo.pop()
            if below.checkpoint is not None:
                path = [*path, below]
                most = max(most, path, key=len)
            todo += [(child, path) for child in below.children.values()]
        return found + most

    def is_pinned(self, block: int) -> bool:
        """Whether somebody else holds one of the blocks here."""
        node = self._by_block[block]
        return node.pins > sum(child.pins > 0 for child in node.children.values())

    def _file_checkpoint(self, node: Node) -> None:
        checkpoint = node.checkpoint
        if checkpoint is not None and not checkpoint.num_readers and not checkpoint.is_hosted:
            self._idle.put(node)

    # ---- eviction

    def remember_evicted(self, node: Node) -> None:
        """What is kept of it is about to go for good, for want of memory."""
        if not node.is_void:
            self.evicted.add(node.path)

    def checkpoint_priority(self, node: Node) -> Priority:
        """Tokens since the checkpoint above; with the last of a path go the blocks since then."""
        checkpoint = node.checkpoint
        assert checkpoint is not None
        above = self.above(node)
        num_tokens = node.num_tokens - (above.num_tokens if above else 0)
        num_bytes = self._layout.slot_stride + (0 if node.num_filled else num_tokens * self._bytes_per_token)
        return priority(num_tokens, num_bytes, checkpoint.last_used)

    def _leaf_priority(self, node: Node) -> Priority:
        if node.checkpoint is not None and not node.checkpoint.is_hosted:  # it goes with the block
            return self.checkpoint_priority(node)
        num_tokens = self._layout.block_size if self.is_useful(node) else 0
        return priority(num_tokens, self._layout.block_stride, node.last_used)

    def is_useful(self, node: Node) -> bool:
        """Whether the last block of a path is worth something. Where sequences have a state, tokens after the
        last checkpoint have to be computed anyway."""
        return not self._layout.slots_per_slab or node.checkpoint is not None or node.num_hosted > 0

    @property
    def first_checkpoint(self) -> Node | None:
        """The next to go."""
        return self._idle.first()

    @property
    def has_useless_block(self) -> bool:
        """Whether the next block to go is one after the last checkpoint of its path."""
        node = self._leaves.first()
        return node is not None and not self.is_useful(node)

    @property
    def first_block(self) -> Node | None:
        """The next to go: the last block of some path."""
        return self._leaves.first()

    def take_block(self, node: Node) -> tuple[int, Checkpoint | None]:
        """The last block of a path, which nobody else holds; with the checkpoint, if that is in the arena."""
        assert node.parent is not None
        is_free = node.checkpoint is None or node.checkpoint.is_hosted
        checkpoint = None if is_free else self._take_from(node)
        self._leaves.remove(node)
        block, node.block = node.block, 0
        del self._by_block[block]
        self.num_evictable_blocks -= 1
        parent = node.parent
        parent.num_filled -= 1
        parent.last_used = max(parent.last_used, node.last_used)
        self._file_leaf(parent)
        self.prune(node)
        return block, checkpoint

    def _take_from(self, node: Node) -> Checkpoint:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        assert not checkpoint.num_readers
        node.checkpoint = None
        del self._checkpointed[node]
        if checkpoint.is_hosted:
            self._num_hosted -= 1
            self._leave_host(node)
        else:
            self._idle.remove(node)
        return checkpoint

    # ---- checks

    def check_integrity(self) -> None:
        """Raise IntegrityError unless all counts are what the tree says. Costs O(nodes)."""
        nodes = list(self.nodes)
        for node in nodes:
            node.check_integrity(has_blocks=self._layout.blocks_per_slab > 0)
        blocks = {node.block: node for node in nodes if node.block}
        evictable = [node for node in blocks.values() if not node.pins]
        if blocks != self._by_block or len(evictable) != self.num_evictable_blocks:
            raise IntegrityError("blocks of the tree were miscounted")
        if sum(not node.num_filled for node in evictable) != len(self._leaves):
            raise IntegrityError("what is to be evicted next was miscounted")
        checkpointed = {node for node in nodes if node.checkpoint is not None}
        idle = sum(not one.num_readers and not one.is_hosted for one in self.checkpoints)
        hosted = sum(one.is_hosted for one in self.checkpoints)
        if checkpointed != set(self._checkpointed) or idle != len(self._idle) or hosted != self._num_hosted:
            raise IntegrityError("checkpoints of the tree were miscounted")

    def max_checkpoints_on_a_path(self) -> int:
        return max((len(self.checkpoints_around(node)) for node in self._checkpointed), default=0)
