"""Splits a ragged batch by length of query, once a step. Knows indices; knows no operator.

Sequences of one token are `Singles`; longer ones are `Chunks`. Which of the two a sequence is depends on its own
length alone; whether it has a state is read from `has_state`, never inferred from that length.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

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
            return x.narrow(0, self.start, self.num)
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
    fresh: torch.Tensor  # [f] members of the group that start from zero

    @classmethod
    def of(cls, metadata: SSMMetadata, sequences: list[int]) -> Slots:
        members = torch.tensor(sequences, device=metadata.state_slots.device)
        fresh = metadata.has_state.index_select(0, members).logical_not().nonzero().flatten()
        return cls(metadata.state_slots.index_select(0, members), fresh)

    def read(self, state: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The states [n, ...], a float32 copy. What a fresh sequence's slot holds is overwritten: it can't leak."""
        if out is None:
            out = state.new_empty(len(self.index), *state.shape[1:], dtype=torch.float32)
        if state.dtype == out.dtype:
            torch.index_select(state, 0, self.index, out=out)
        else:
            out.copy_(state.index_select(0, self.index))
        if self.fresh.numel():
            out.index_fill_(0, self.fresh, 0.0)
        return out

    def write(self, state: torch.Tensor, values: torch.Tensor) -> None:
        state.index_copy_(0, self.index, values.to(state.dtype))


@dataclass(slots=True)
class Singles:
    """Sequences with one token in this step."""

    slots: Slots
    tokens: Rows


@dataclass(slots=True)
class Chunks:
    """Sequences with more than one token in this step, longest first."""

    slots: Slots
    tokens: Rows
    """One sequence after the other."""
    sequence_of_token: torch.Tensor  # [n]
    ends: torch.Tensor  # [S] where each sequence's tokens end, within `tokens`
    time_major: Rows
    """Ordered by time, then sequence. As the longest come first, those alive at time t are the first `widths[t]`."""
    widths: list[int]


@dataclass(slots=True)
class RaggedMetadata(SSMMetadata):
    singles: Singles | None
    chunks: Chunks | None


def split(metadata: SSMMetadata) -> RaggedMetadata:
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
    lens = [metadata.query_lens[i] for i in members]
    tokens = [position for i in members for position in range(starts[i], starts[i + 1])]
    time_major: list[int] = []
    widths: list[int] = []
    alive = len(members)
    for t in range(lens[0]):
        while lens[alive - 1] <= t:
            alive -= 1
        time_major += [starts[i] + t for i in members[:alive]]
        widths.append(alive)
    return Chunks(
        slots=Slots.of(metadata, members),
        tokens=Rows.at(tokens, device),
        sequence_of_token=torch.arange(len(members)).repeat_interleave(torch.tensor(lens)).to(device),
        ends=torch.tensor(list(accumulate(lens)), device=device),
        time_major=Rows.at(time_major, device),
        widths=widths,
    )
