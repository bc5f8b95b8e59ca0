"""The scheduler's decision for one step: the boundary between what decides and what computes.

Plain integers only; an engine turns it into arrays (`engine.input_builder`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step: tokens `start .. start + length` of it are computed."""

    request_id: str
    start: int
    length: int
    samples: tuple[str, ...]
    """Request ids that each draw one token from the logits of the last position: empty while a prompt is
    incomplete; the request itself; after a prompt with n > 1, the request and the children that fork from
    it."""
    has_state: bool
    """Whether the slot holds the state after `start` tokens. A fact, never inferred from `length` (D5)."""
    block_ids: tuple[int, ...]
    state_slot: int
    """0 (the null slot) for a model without state."""
    adapter_slot: int = 0
    """0 for the base model."""
    adapter_start: int = 0
    """The position from which on the adapter is on."""
    write_from: int = 0
    """K and V of positions before it are there, in blocks that others share: they are computed again for the
    state's sake, and go to the null block."""


class UnitCopy(NamedTuple):
    """Copy one block or one slot onto another."""

    source: int
    destination: int


class UnitCopies(NamedTuple):
    """Copies of blocks and of slots."""

    blocks: tuple[UnitCopy, ...] = ()
    slots: tuple[UnitCopy, ...] = ()


NO_COPIES = UnitCopies()


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What one step computes. It runs at most once (D7).

    In order: forget `finished`, swap out, move, swap in, make the copies, run the layers over `sequences`,
    make the saves, draw. Whoever runs steps runs them one after the other. So a unit that a step swaps or
    moves away may hold something else in the same step.

    Raises ValueError if it contradicts itself.
    """

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    state_copies: tuple[UnitCopy, ...] = ()
    block_copies: tuple[UnitCopy, ...] = ()
    state_saves: tuple[UnitCopy, ...] = ()
    """Copies of states as they are after this step."""
    swaps_out: UnitCopies = NO_COPIES
    """From the arena (sources) to the host's memory (destinations); all sources as the step finds them."""
    moves: UnitCopies = NO_COPIES
    """Within the arena; all sources as the step finds them."""
    swaps_in: UnitCopies = NO_COPIES
    """From the host's memory (sources) to the arena (destinations)."""
    moved: tuple[str, ...] = ()
    """Ids of live requests whose blocks or slot have other numbers now."""
    finished: tuple[str, ...] = ()
    """Ids that gave up their memory since the step before: finished, aborted or preempted (and perhaps back
    here)."""
    adapter_generations: tuple[tuple[int, int], ...] = ()
    """(slot, generation) of every adapter slot that the sequences use: a worker that holds another generation
    would compute with the wrong adapter."""

    def __post_init__(self) -> None:
        names: set[str] = set()
        drawn: list[str] = []
        for request_id, start, length, samples, has_state, block_ids, state_slot, *_ in self.sequences:
            names.add(request_id)
            drawn += samples
            if start < 0 or length < 1:
                raise ValueError(f"{request_id}: tokens {start} .. {start + length} are not a chunk")
            if has_state != (start > 0 and state_slot > 0):
                raise ValueError(f"{request_id}: has_state {has_state} at token {start} in slot {state_slot}")
            if not block_ids and not state_slot:
                raise ValueError(f"{request_id}: holds no memory")
        if not names or len(names) != len(self.sequences):
            raise ValueError("a step has sequences, and each of them once")
        if len(set(drawn)) != len(drawn):
            raise ValueError("a request would draw two tokens in one step")
        saved = {copy.destination for copy in self.state_saves}
        if saved & {sequence.state_slot for sequence in self.sequences}:
            raise ValueError("a state would be saved onto another")
        for copies in (self.state_copies, self.block_copies, self.state_saves):
            destinations = {copy.destination for copy in copies}
            if any(copy.source in destinations for copy in copies):
                raise ValueError("copies would overwrite each other, so their order would matter")
        every = (self.state_copies, self.block_copies, self.state_saves)
        for copies in (*every, *self.swaps_out, *self.moves, *self.swaps_in):
            if len({copy.destination for copy in copies}) != len(copies):
                raise ValueError("copies would overwrite each other, so their order would matter")
            if any(0 in copy for copy in copies):
                raise ValueError("a copy from or to a null unit")

    @property
    def num_tokens(self) -> int:
        return sum([sequence.length for sequence in self.sequences])
