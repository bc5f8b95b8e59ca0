"""Why tokens of a prompt have to be computed: each of them has one cause. Knows trails and the tree; changes
neither, and does not know memory.

All that it remembers has an end, and none of it crosses a salt: what is counted says nothing of prompts that
others keep apart.
"""

from __future__ import annotations

import enum
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hybridserve.core.prefix_nodes import Node
    from hybridserve.core.prefix_trails import Match, Trail
    from hybridserve.core.prefix_waits import PrefixWaits

MAX_EVICTED = 2**16
"""Ends of prefixes that are remembered after they had to go."""
MAX_STARTS = 2**12
"""First blocks whose last user's adapter is remembered."""

_TOKEN_BYTES = array("i").itemsize


class Miss(enum.StrEnum):
    """Why tokens were computed though they are a prompt's."""

    NO_CHECKPOINT = "no_checkpoint"  # K and V are there, and no state at their end
    CONCURRENT = (
        "concurrent"  # another request is computing them, and leaves no state where this one needs it
    )
    EVICTED = "evicted"  # they were there and had to make room
    OTHER_ADAPTER = "other_adapter"  # they are there as another adapter, or the base model, computes them
    PARTED = "parted"  # others, who share what comes before, went on differently
    NEW = "new"  # nobody with this salt has brought them, or it was too long ago
    SHORT = "short"  # all of a prompt that has no whole block before its last token
    REMAINDER = "remainder"  # after the last whole block before a prompt's last token
    SCORED = "scored"  # the prompt's own log-probabilities were asked for


class EvictedPaths:
    """The ends of prefixes that are not there any more, the newest of them, by `Node.path`."""

    def __init__(self, limit: int = MAX_EVICTED) -> None:
        self._limit = limit
        self._paths: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, path: int) -> bool:
        return path in self._paths

    def __len__(self) -> int:
        return len(self._paths)

    def add(self, path: int) -> None:
        self._paths[path] = None
        self._paths.move_to_end(path)
        if len(self._paths) > self._limit:
            self._paths.popitem(last=False)


class PrefixMisses:
    """Asked once for each prompt, when it is first admitted. Costs O(blocks that are missing)."""

    def __init__(self, evicted: EvictedPaths, waits: PrefixWaits, *, size: int, has_blocks: bool) -> None:
        self._evicted = evicted
        self._waits = waits
        self._size = size
        self._has_blocks = has_blocks
        self._starts: OrderedDict[tuple[int, bytes], bytes] = OrderedDict()
        """(root, token ids of a first block) -> the key of the last one that had them."""

    def of(self, trail: Trail, match: Match) -> Iterator[tuple[Miss, int]]:
        """(cause, tokens) of all tokens of a prompt that begins with `match`, but those that it saves."""
        request, size = trail.request, self._size
        limit = (request.num_prompt - 1) // size
        if request.params.prompt_logprobs is not None:
            yield Miss.SCORED, request.num_prompt
            return
        if not limit:
            yield Miss.SHORT, request.num_prompt
            return
        yield Miss.REMAINDER, request.num_prompt - limit * size
        nodes, hit = trail.nodes[:limit], min(match.num_tokens // size, limit)
        known = self._num_with_kv(nodes) if self._has_blocks else max(hit, _num_known(nodes))
        yield Miss.NO_CHECKPOINT, (known - hit) * size
        place = known
        while place < limit and self._waits.has_writer(nodes[place]):
            place += 1
        yield Miss.CONCURRENT, (place - known) * size
        after_evicted = max(
            (end for end in range(place + 1, limit + 1) if nodes[end - 1].path in self._evicted),
            default=place,
        )
        yield Miss.EVICTED, (after_evicted - place) * size
        place = after_evicted
        elsewhere = 0 if place else self._num_elsewhere(trail.root, nodes)
        yield Miss.OTHER_ADAPTER, elsewhere * size
        has_parted = 0 < place < limit and len(nodes[place - 1].children) > 1  # one of them is its own
        yield Miss.PARTED if has_parted else Miss.NEW, (limit - place - elsewhere) * size
        self._remember_start(trail.root, nodes[0])

    def _num_with_kv(self, nodes: Sequence[Node]) -> int:
        return next((place for place, node in enumerate(nodes) if not _has_kv(node)), len(nodes))

    def _num_elsewhere(self, root: Node, nodes: Sequence[Node]) -> int:
        """Blocks of a path whose first is not there that are there for the base model, or for the adapter
        that last began with the same tokens."""
        tokens = self._tokens_of(nodes[0])
        keys = {tokens, self._starts.get((root.path, tokens), tokens)} - {nodes[0].key}
        return max((self._num_there(root, key, nodes) for key in keys), default=0)

    def _num_there(self, root: Node, first: bytes, nodes: Sequence[Node]) -> int:
        node, count = root.children.get(first), 0
        while node is not None and (_has_kv(node) or not self._has_blocks):
            count += 1
            node = node.children.get(nodes[count].key) if count < len(nodes) else None
        return count

    def _remember_start(self, root: Node, node: Node) -> None:
        start = (root.path, self._tokens_of(node))
        self._starts[start] = node.key
        self._starts.move_to_end(start)
        if len(self._starts) > MAX_STARTS:
            self._starts.popitem(last=False)

    def _tokens_of(self, node: Node) -> bytes:
        """A key without what says which adapter begins in its block."""
        return node.key[: self._size * _TOKEN_BYTES]


def _has_kv(node: Node) -> bool:
    return bool(node.block or node.host_block)


def _num_known(nodes: Sequence[Node]) -> int:
    """How far a path leads to states that others left, where that is all that is kept: a node that no live
    request needs is there for a state on it or below."""
    for count in range(len(nodes), 0, -1):
        node = nodes[count - 1]
        own = nodes[count] if count < len(nodes) else None
        if node.checkpoint is not None:
            return count
        if any(child is not own and not child.num_users for child in node.children.values()):
            return count
    return 0
