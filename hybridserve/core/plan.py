"""A step while it is being planned and then until its results are in. Knows what goes into a step; does not
know who decides it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridserve.core.compaction import rename_copies
from hybridserve.core.named import maker
from hybridserve.core.step import ScheduledSequence, ScheduledStep, UnitCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hybridserve.core.cache_manager import ForkCopies
    from hybridserve.core.compaction import Renaming
    from hybridserve.core.request import Request
    from hybridserve.core.step import UnitCopy


_sequence = maker(ScheduledSequence)

Share = tuple["Request", int, int, tuple[str, ...], int]
"""A request's share of a step: the request, tokens `start`, `length`, who draws, its adapter's slot. Where
they go is not said before the step is frozen, as what its memory is called may still change."""


@dataclass(slots=True)
class StepPlan:
    step_id: int
    budget: int  # tokens that it has room for
    shares: list[Share] = field(default_factory=list)
    state_copies: list[UnitCopy] = field(default_factory=list)
    block_copies: list[UnitCopy] = field(default_factory=list)
    state_saves: tuple[UnitCopy, ...] = ()
    block_swaps_in: list[UnitCopy] = field(default_factory=list)
    state_swaps_in: list[UnitCopy] = field(default_factory=list)
    draws: list[Request] = field(default_factory=list)
    completed: list[Request] = field(default_factory=list)
    """Those whose prompts are done and that draw nothing."""
    adapter_slots: set[int] = field(default_factory=set)
    is_starved: bool = False
    """A running sequence found no memory."""

    def fork(self, parent: Request, child: Request, copies: ForkCopies) -> None:
        self.state_copies += copies.state
        self.block_copies += copies.blocks
        parent.last_step = child.last_step = self.step_id

    def rename(self, renaming: Renaming) -> None:
        """Units have moved: a step copies after it has moved."""
        blocks, slots = renaming
        self.state_copies = rename_copies(self.state_copies, slots)
        self.block_copies = rename_copies(self.block_copies, blocks)
        self.state_swaps_in = rename_copies(self.state_swaps_in, slots, sources=False)
        self.block_swaps_in = rename_copies(self.block_swaps_in, blocks, sources=False)

    def freeze(
        self,
        finished: Iterable[str],
        generation: Callable[[int], int],
        *,
        swaps_out: UnitCopies,
        moves: UnitCopies,
        moved: Iterable[str],
    ) -> ScheduledStep:
        return ScheduledStep(
            step_id=self.step_id,
            sequences=tuple(map(_sequence, self._rows())),
            state_copies=tuple(self.state_copies),
            block_copies=tuple(self.block_copies),
            state_saves=self.state_saves,
            swaps_out=swaps_out,
            moves=moves,
            swaps_in=UnitCopies(tuple(self.block_swaps_in), tuple(self.state_swaps_in)),
            moved=tuple(moved),
            finished=tuple(dict.fromkeys(finished)),
            adapter_generations=tuple([(slot, generation(slot)) for slot in sorted(self.adapter_slots)]),
        )

    def _rows(self) -> list[tuple[Any, ...]]:
        """The fields of every `ScheduledSequence`."""
        return [
            (
                request.id,
                start,
                length,
                samples,
                start > 0 and request.state_slot > 0,
                request.block_ids,
                request.state_slot,
                adapter_slot,
                request.adapter_start,
                request.write_from,
            )
            for request, start, length, samples, adapter_slot in self.shares
        ]
