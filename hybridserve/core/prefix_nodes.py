"""What the tree of prefixes is made of: nodes, and the checkpoints that hang there. Knows what must hold
between a node and those next to it; does not know what of it may go.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hybridserve.core.slabs import IntegrityError


class Cause(enum.StrEnum):
    """Why a checkpoint was taken where it is."""

    PROMPT = "prompt"  # the last block boundary before the last token of a prompt
    PARTING = "parting"  # where two requests part ways
    INTERVAL = "interval"  # every so many tokens of a long prompt
    TURN = "turn"  # the newest block boundary of a sequence that generates


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A copy of a sequence's state. Only what a step that has finished wrote hangs in the tree (D13)."""

    num_tokens: int
    """Tokens that it covers."""
    slot: int
    generation: int
    """Of the slot, when it was written."""
    step_id: int
    """That wrote it."""
    cause: Cause
    last_used: int
    num_hits: int = 0
    num_readers: int = 0
    """Steps in flight that copy from it."""
    is_hosted: bool = False
    """Whether its slot is one of the host's memory."""
    is_proven: bool = False
    """Whether somebody who wrote it or began with it has drawn a token since."""


class Node:
    """One full block of tokens after all those above it."""

    __slots__ = (
        "block",
        "checkpoint",
        "children",
        "host_block",
        "is_proven",
        "is_void",
        "key",
        "last_used",
        "num_filled",
        "num_host_readers",
        "num_hosted",
        "num_tokens",
        "num_users",
        "parent",
        "path",
        "pins",
    )

    def __init__(self, parent: Node | None, key: bytes, num_tokens: int) -> None:
        self.parent = parent
        self.key = key
        self.path: int = hash((parent.path, key)) if parent else 0  # tells it from others when it is gone
        self.num_tokens = num_tokens  # up to its end
        self.children: dict[bytes, Node] = {}
        self.num_users = 0  # live requests whose tokens these are
        self.block = 0
        self.host_block = 0  # where K and V are in the host's memory; not both, unless a step reads it there
        self.num_host_readers = 0  # steps in flight that do
        self.num_hosted = 0  # 1 if the checkpoint is in the host's memory, and 1 for each child that has any
        self.num_filled = 0  # children that have a block
        self.pins = 0  # 1 if somebody else holds the block, and 1 for each child that has pins
        self.last_used = 0
        self.checkpoint: Checkpoint | None = None
        self.is_void = False  # what hangs here is not to be used
        self.is_proven = False  # somebody who wrote K and V or began with them has drawn a token since

    @property
    def is_bare(self) -> bool:
        kept = self.block or self.host_block or self.checkpoint
        return not (self.children or self.num_users or kept)

    @property
    def has_kv(self) -> bool:
        return self.block > 0 or self.host_block > 0

    @property
    def is_doubtful(self) -> bool:
        """Whether something is kept here that nobody has drawn a token from."""
        if self.has_kv and not self.is_proven:
            return True
        return self.checkpoint is not None and not self.checkpoint.is_proven

    @property
    def has_hosted_checkpoint(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.is_hosted

    def check_integrity(self, *, has_blocks: bool) -> None:
        """Raise IntegrityError unless its counts are those of its children. `has_blocks`: whether there are
        layers with K and V."""
        children = self.children.values()
        if self.num_filled != sum(child.block > 0 for child in children):
            raise IntegrityError("a node has miscounted its children")
        if self.num_hosted != self.has_hosted_checkpoint + sum(child.num_hosted > 0 for child in children):
            raise IntegrityError("a node has miscounted what is in the host's memory")
        if self.num_host_readers and not self.host_block:
            raise IntegrityError("a step copies K and V from where they are not")
        if self.host_block and self.block and not self.num_host_readers:
            raise IntegrityError("K and V are in two places")
        if self.parent is None:
            return
        if self.is_bare or self.parent.children.get(self.key) is not self:
            raise IntegrityError("a node is left that nobody needs")
        if self.num_users < sum(child.num_users for child in children):
            raise IntegrityError("a node has fewer users than the nodes below it")
        num_pinned = sum(child.pins > 0 for child in children)
        if not num_pinned <= self.pins <= num_pinned + 1:
            raise IntegrityError("a node is pinned more or less often than it should be")
        if self.block and self.parent.num_tokens and not self.parent.block:
            raise IntegrityError("a block without the one before it")
        if self.checkpoint is None:
            return
        if self.checkpoint.num_tokens != self.num_tokens:
            raise IntegrityError("a checkpoint hangs where it does not belong")
        if has_blocks and not self.block and not self.checkpoint.is_hosted:
            raise IntegrityError("a checkpoint without K and V")
