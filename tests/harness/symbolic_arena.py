"""The arena and the host's memory as dictionaries: what each unit holds, as tokens. Knows bytes' fate (who
overwrites whom, in which order a step does things); does not know a scheduler.

A state is the tuple of all tokens that it has seen, a block the tokens in its places. A slab that comes to
hold units of the other kind forgets what it held, as their bytes are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.core.step import ScheduledSequence, ScheduledStep, UnitCopies

State = tuple[int, ...]
Block = dict[int, int]
"""Place in the block -> token."""


class SymbolicMemory:
    """Blocks and slots in slabs. A block that was never written is empty; such a slot holds None."""

    def __init__(self, layout: CacheLayout) -> None:
        self._sizes = {"block": layout.blocks_per_slab, "slot": layout.slots_per_slab}
        self._kinds: dict[int, str] = {}  # slab -> the kind of unit written there last
        self._units: dict[tuple[str, int], object] = {}

    def block(self, block: int) -> Block:
        return dict(self._units.get(("block", block), {}))

    def slot(self, slot: int) -> State | None:
        return self._units.get(("slot", slot))

    def read(self, kind: str, unit: int) -> object:
        return self.block(unit) if kind == "block" else self.slot(unit)

    def write(self, kind: str, unit: int, content: object) -> None:
        assert unit, f"{kind} 0 is written"
        slab = unit // self._sizes[kind]
        if self._kinds.get(slab, kind) != kind:
            other = self._kinds[slab]
            for index in range(slab * self._sizes[other], (slab + 1) * self._sizes[other]):
                self._units.pop((other, index), None)
        self._kinds[slab] = kind
        self._units[kind, unit] = content

    def copy(self, copies: UnitCopies, target: SymbolicMemory) -> None:
        """All sources are read before any destination is written."""
        contents = [
            (kind, destination, self.read(kind, source))
            for kind, pairs in (("block", copies.blocks), ("slot", copies.slots))
            for source, destination in pairs
        ]
        for kind, destination, content in contents:
            target.write(kind, destination, content)


class SymbolicArena:
    """Does what a step says, in the documented order (`ScheduledStep`): `begin`, `compute` for each sequence,
    `end`. Fails where a sequence would read anything but its own history."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.device, self.host = SymbolicMemory(layout), SymbolicMemory(layout)

    def begin(self, step: ScheduledStep) -> None:
        """Swaps out, moves, swaps in, copies of blocks and states."""
        device = self.device
        device.copy(step.swaps_out, self.host)
        device.copy(step.moves, device)
        self.host.copy(step.swaps_in, device)
        device.copy(type(step.moves)(step.block_copies, step.state_copies), device)

    def compute(self, sequence: ScheduledSequence, history: Sequence[int]) -> None:
        """Read and write as a model's layers do. `history`: the sequence's tokens up to the end of its chunk,
        as they would be alone (with what its adapter makes of them)."""
        start, end, size = sequence.start, sequence.start + sequence.length, self.layout.block_size
        name = sequence.request_id
        assert len(history) == end
        if self.layout.slots_per_slab:
            state = self.device.slot(sequence.state_slot) if sequence.has_state else ()
            assert state == tuple(history[:start]), f"{name} begins with somebody else's state, or none"
            self.device.write("slot", sequence.state_slot, tuple(history))
        if not self.layout.blocks_per_slab:
            return
        blocks = sequence.block_ids
        first = max(start, sequence.write_from)
        for place in range(first // size, -(-end // size) if end > first else 0):
            content = self.device.block(blocks[place])
            for position in range(max(first, place * size), min(end, (place + 1) * size)):
                content[position % size] = history[position]
            self.device.write("block", blocks[place], content)
        for place in range(-(-end // size)):
            content = self.device.block(blocks[place])
            for position in range(place * size, min(end, (place + 1) * size)):
                assert content.get(position % size) == history[position], (
                    f"{name}: block {blocks[place]} holds another token {position} than it computed"
                )

    def end(self, step: ScheduledStep) -> None:
        """Saves of states."""
        self.device.copy(type(step.moves)((), step.state_saves), self.device)
