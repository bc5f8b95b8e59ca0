"""A request's way through the tree of prefixes, and where on it a checkpoint is worth taking. Knows requests
and nodes; does not know memory or steps.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hybridserve.core.prefix_nodes import Cause, Node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.core.prefix_index import PrefixIndex
    from hybridserve.core.prefix_nodes import Checkpoint
    from hybridserve.core.request import Request

MAX_PARTINGS = 2
MAX_INTERVALS = 4
"""Of the checkpoints that one prompt is cut for: where others leave it, and in between."""


class Match(NamedTuple):
    """What a request can begin with."""

    num_tokens: int = 0
    """That need not be computed."""
    shared: tuple[Node, ...] = ()
    """With K and V in the arena; they may reach further."""
    node: Node | None = None
    """Where the tokens end."""
    hosted: tuple[Node, ...] = ()
    """After `shared`, up to where the tokens end: with K and V in the host's memory."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """Of `shared`, as they are called now: while room is made, they may move."""
        return tuple([node.block for node in self.shared])

    @property
    def num_blocks(self) -> int:
        """With K and V, wherever they are."""
        return len(self.shared) + len(self.hosted)


class Cut(NamedTuple):
    """A chunk has to end after so many tokens."""

    num_tokens: int
    cause: Cause


@dataclass(slots=True, eq=False)
class Trail:
    """A live request and the nodes of its tokens, as far as it has asked for them."""

    request: Request
    index: PrefixIndex
    size: int
    """Tokens of a block."""
    root: Node = field(init=False)
    nodes: list[Node] = field(default_factory=list)
    has_begun: bool = False
    """Whether it has had memory since this tree began: what is there now may be its own."""
    first_own: int = 0
    """Nodes before it were there when it began."""
    is_trusted: bool = True
    unproven: list[Node | Checkpoint] = field(default_factory=list)
    """K and V, and states, that it has begun with or written since it drew its last token."""
    num_noted: int = 0
    """Of its blocks, those that are in the tree or will be when their step has finished."""
    cuts: list[Cut] = field(default_factory=list)
    turn_from: int = 0
    """From here on it generates."""
    turn: Node | None = None
    """Where it left its newest checkpoint since then."""
    num_pending: int = 0
    """Steps in flight that add to it."""
    is_open: bool = True
    held_at: Node | None = None
    """What it waits for."""
    may_wait: bool = True

    def __post_init__(self) -> None:
        self.root = self.index.root(self.request.cache_salt)

    @property
    def limit(self) -> int:
        """Nodes that it could begin after: at least one known token is computed."""
        return (self.request.num_known - 1) // self.size

    def extend(self, num_blocks: int) -> None:
        for place in range(len(self.nodes), num_blocks):
            parent = self.nodes[-1] if place else self.root
            key = block_key(self.request, place, self.size)
            self.nodes.append(self.index.child(parent, key, (place + 1) * self.size))

    def path(self) -> list[Node]:
        """The nodes that a waiting request could begin after, as others find them."""
        void = next((place for place, node in enumerate(self.nodes) if node.is_void), None)
        if void is not None:
            self.index.leave(self.nodes[void:])
            del self.nodes[void:]
        self.extend(self.limit)
        return self.nodes[: self.limit]

    def begins_with(self, match: Match) -> None:
        """With this, and nothing that it had before."""
        self.unproven = [node for node in match.shared if not node.is_proven]
        checkpoint = match.node.checkpoint if match.node is not None else None
        if checkpoint is not None and not checkpoint.is_proven:
            self.unproven.append(checkpoint)

    def drew(self) -> None:
        """A token: so all that it has used is good."""
        for one in self.unproven:
            one.is_proven = True
        self.unproven.clear()

    def suspect(self) -> Node | None:
        """What it has computed is wrong. Returns the first node that others are not to use: of its own, or of
        those that it began with and nobody has drawn from. What was proven has to be proven again."""
        self.is_trusted = False
        if not self.has_begun:
            return None
        began = self.nodes[: self.first_own]
        first = next((node for node in began if node.is_doubtful), None)
        for node in began:
            node.is_proven = False
        if began and began[-1].checkpoint is not None:
            began[-1].checkpoint.is_proven = False
        own = (node for node in self.nodes[self.first_own :] if node.has_kv or node.checkpoint is not None)
        return first or next(own, None)

    def leave_when_done(self) -> None:
        if not self.is_open and not self.num_pending:
            self.index.leave([self.root, *self.nodes])


def block_key(request: Request, place: int, size: int) -> bytes:
    """A block's token ids; in the block where an adapter begins to act, with what it does from where."""
    start, end = place * size, (place + 1) * size
    key = array("i", request.token_ids(start, end)).tobytes()
    adapter_id, adapter_start = request.cache_key
    if adapter_id is not None and start <= adapter_start < end:
        key += f"{adapter_start}:{adapter_id}".encode()
    return key


def plan_cuts(trail: Trail, match: Match, *, interval: int, has_blocks: bool) -> list[Cut]:
    """Where the chunks of what a request computes first shall end, for a checkpoint each: the last block
    boundary before its last token, where others leave it, and every `interval` tokens (0: not)."""
    size = trail.size
    nodes = trail.nodes[: trail.limit]
    start, last = match.num_tokens, len(nodes) * size
    cuts: dict[int, Cause] = {}
    if interval and last > start:
        share = -(-(last - start) // ((MAX_INTERVALS + 1) * size)) * size
        step = max(interval, share)
        cuts |= dict.fromkeys(range(start // step * step + step, last, step), Cause.INTERVAL)
    cuts[last] = Cause.PROMPT
    known = match.num_blocks if has_blocks else _num_known_to_others(nodes)
    for end in (*_partings(nodes[start // size :]), known * size):
        cuts[end] = Cause.PARTING
    return [
        Cut(end, cause)
        for end, cause in sorted(cuts.items())
        if start < end <= last and nodes[end // size - 1].checkpoint is None
    ]


def _partings(nodes: Sequence[Node]) -> list[int]:
    """Where most of the live requests that share a path leave it."""
    leaving = [
        (node.num_users - following.num_users, node.num_tokens)
        for node, following in itertools.pairwise(nodes)
        if node.num_users > following.num_users
    ]
    return [num_tokens for _, num_tokens in sorted(leaving)[-MAX_PARTINGS:]]


def _num_known_to_others(nodes: Sequence[Node]) -> int:
    """How many nodes of a path are in the tree for more than one request's sake."""
    count = len(nodes)
    while count:
        node = nodes[count - 1]
        own = count < len(nodes) and nodes[count].key in node.children
        if node.num_users > 1 or node.checkpoint is not None or len(node.children) > own:
            break
        count -= 1
    return count
