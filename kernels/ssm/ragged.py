"""Splits a ragged batch by length of query, once a step. Knows indices; knows no operator.

Sequences of one token are `Singles`; longer ones are `Chunks`. Which of the two a sequence is depends on its
own length alone; whether it has a state is read from `has_state`, never inferred from that length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch

from hybridserve.kernels.ssm.interface import SSMMetadata


@dataclass(slots=True)
class Rows:
    """Some rows of a flat tensor: a slice where they are consecutive (no copy), else an index [num]."""

    start: int
    num: int
    index: torch.Tensor | None

    @classmethod
    def at(cls, positions: list[int], device: torch.device) -> Rows:
        start, num = positions[0], len(positions)
        if positions == list(range(start, start + num)):
            return cls(start, num, None)
        return cls(start, num, torch.tensor(positions, device=device))

    def part(self, start: int, num: int) -> Rows:
        index = None if self.index is None else self.index[start : start + num]
        return Rows(self.start + start, num, index)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        if self.index is None:
            return x if self.num == len(x) else x.narrow(0, self.start, self.num)
        return x.index_select(0, self.index)

    def put(self, out: torch.Tensor, values: torch.Tensor) -> None:
        if self.index is None:
            out.narrow(0, self.start, self.num).copy_(values)
        else:
            out.index_copy_(0, self.index, values.to(out.dtype))


@dataclass(slots=True)
class Slots:
    """Where a group of sequences keeps its states, and which of them have none yet."""

    index: torch.Tensor  # [n] slots
    fresh: torch.Tensor | None  # [f] members of the group that start from zero; None where all have a state
    only: int | None  # the slot, where it is the only one and known without waiting for a device

    @classmethod
    def of(cls, metadata: SSMMetadata, sequences: list[int]) -> Slots:
        members = torch.tensor(sequences, device=metadata.state_slots.device)
        index = metadata.state_slots.index_select(0, members)
        fresh = metadata.has_state.index_select(0, members).logical_not().nonzero().flatten()
        on_host = len(sequences) == 1 and index.device.type == "cpu"
        return cls(index, fresh if len(fresh) else None, int(index) if on_host else None)

    def read(self, state: torch.Tensor) -> torch.Tensor:
        """The states [n, ...] in the state's dtype: a copy or, of a single slot, that slot itself.

        What a fresh sequence's slot holds is overwritten, never multiplied by zero: it can't leak.
        """
        only = self.only
        values = state.index_select(0, self.index) if only is None else state.narrow(0, only, 1)
        if self.fresh is not None:
            values.index_fill_(0, self.fresh, 0.0)
        return values

    def write(self, state: torch.Tensor, values: torch.Tensor) -> None:
        """Store the states [n, ...] of any dtype; those of a single slot may have been changed in place."""
        if self.only is None:
            state.index_copy_(0, self.index, values.to(state.dtype))
        elif values.data_ptr() != (slot := state.narrow(0, self.only, 1)).data_ptr():
            slot.copy_(values)


@dataclass(slots=True)
class Singles:
    """Sequences with one token in this step."""

    slots: Slots
    tokens: Rows


@dataclass(slots=True)
class Edges:
    """Where sequences meet, as a convolution over P past inputs sees it.

    Row numbers index the past inputs of all sequences [S * P] followed by the inputs of `tokens`.
    """

    tokens: torch.Tensor  # [E] flat positions of the first and the last P tokens of each sequence
    heads: Rows  # [H] flat positions of the first P tokens of each sequence
    windows: torch.Tensor  # [H, P + 1] rows that each head sees, itself last
    tails: torch.Tensor  # [S, P] rows of the last P inputs of each sequence, past ones included


@dataclass(slots=True)
class Block:
    """The next tokens, at most so many of each, of the n longest sequences: those that still have any.

    A block begins where its sequences' own tokens do, never in the middle of what another one began.
    """

    places: torch.Tensor  # [n, Q] flat positions; of a sequence that ends before, its last one again
    valid: torch.Tensor | None  # [n, Q] bool: which of them are no repetition; None where all are
    results: Rows  # the valid ones among all n x Q
    tokens: Rows  # and their flat positions


@dataclass(slots=True)
class Chunks:
    """Sequences with more than one token in this step, longest first."""

    slots: Slots
    spans: list[tuple[int, int]]
    """Where each sequence starts and ends in the flat batch."""
    tokens: Rows
    """In the order of the flat batch."""
    time_major: Rows
    """Ordered by time, then sequence: those alive at time t are the first `widths[t]`, the longest."""
    widths: list[int]
    _edges: dict[int, Edges] = field(default_factory=dict)
    _blocks: dict[int, list[Block]] = field(default_factory=dict)

    def edges(self, num_past: int) -> Edges:
        """Computed once a step: all convolutions of a model are equally wide."""
        if num_past not in self._edges:
            self._edges[num_past] = self._find_edges(num_past)
        return self._edges[num_past]

    def blocks(self, size: int) -> list[Block]:
        """All tokens, `size` of each sequence at a time. Computed once a step."""
        if size not in self._blocks:
            start, stop = self.spans[0]
            self._blocks[size] = [self._cut_block(first, size) for first in range(0, stop - start, size)]
        return self._blocks[size]

    def _cut_block(self, first: int, size: int) -> Block:
        """That of each sequence's tokens `first` .. `first + size`."""
        spans = [(start + first, stop) for start, stop in self.spans if start + first < stop]
        width = min(size, spans[0][1] - spans[0][0])
        places = [[min(start + i, stop - 1) for i in range(width)] for start, stop in spans]
        valid = [[start + i < stop for i in range(width)] for start, stop in spans]
        tokens = [start + i for start, stop in spans for i in range(min(width, stop - start))]
        device = self.slots.index.device
        return Block(
            torch.tensor(places, device=device),
            None if len(tokens) == len(spans) * width else torch.tensor(valid, device=device),
            Rows.at([i for i, each in enumerate(chain.from_iterable(valid)) if each], device),
            Rows.at(tokens, device),
        )

    def _find_edges(self, num_past: int) -> Edges:
        tokens: list[int] = []
        heads: list[int] = []
        windows: list[list[int]] = []
        tails: list[list[int]] = []
        for sequence, (start, stop) in enumerate(self.spans):
            num = min(num_past, stop - start)
            past = range(sequence * num_past, (sequence + 1) * num_past)
            row = len(self.spans) * num_past + len(tokens)
            first = [*past, *range(row, row + num)]
            last = [*past, *range(row + num, row + 2 * num)]
            tokens += [*range(start, start + num), *range(stop - num, stop)]
            heads += range(start, start + num)
            windows += [first[i : i + num_past + 1] for i in range(num)]
            tails.append(last[num:])
        device = self.slots.index.device
        return Edges(
            torch.tensor(tokens, device=device),
            Rows.at(heads, device),
            torch.tensor(windows, device=device),
            torch.tensor(tails, device=device),
        )


@dataclass(slots=True)
class RaggedMetadata(SSMMetadata):
    singles: Singles | None
    chunks: Chunks | None


def split(metadata: SSMMetadata) -> RaggedMetadata:
    """Everything about a batch that does not differ between layers."""
    lens = metadata.query_lens
    starts = [0, *accumulate(lens)]
    short = [i for i, length in enumerate(lens) if length == 1]
    long = sorted((i for i, length in enumerate(lens) if length > 1), key=lambda i: -lens[i])
    return RaggedMetadata(
        metadata.query_start,
        metadata.state_slots,
        metadata.has_state,
        lens,
        _singles(metadata, short, starts) if short else None,
        _chunks(metadata, long, starts) if long else None,
    )


def _singles(metadata: SSMMetadata, members: list[int], starts: list[int]) -> Singles:
    tokens = Rows.at([starts[i] for i in members], metadata.state_slots.device)
    return Singles(Slots.of(metadata, members), tokens)


def _chunks(metadata: SSMMetadata, members: list[int], starts: list[int]) -> Chunks:
    device = metadata.state_slots.device
    spans = [(starts[i], starts[i + 1]) for i in members]
    time_major: list[int] = []
    widths: list[int] = []
    alive = len(spans)
    for t in range(metadata.query_lens[members[0]]):
        while spans[alive - 1][0] + t >= spans[alive - 1][1]:
            alive -= 1
        time_major += [start + t for start, _ in spans[:alive]]
        widths.append(alive)
    return Chunks(
        slots=Slots.of(metadata, members),
        spans=spans,
        tokens=Rows.at(sorted(time_major), device),
        time_major=Rows.at(time_major, device),
        widths=widths,
    )
