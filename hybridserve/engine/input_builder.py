"""Turns a scheduled step into flat arrays: the only thing that crosses from rank 0 to all ranks (D6).

Knows requests; does not know tensors, the model or how tokens are drawn (`sampling_input`). Most steps are as
the one before them, each sequence being a token further: what a column of the step says becomes an array only
where it says something else than before, and a row of the block table grows with its request until the
scheduler says that the request's memory is gone. A step's arrays are its own all the same, as it may be in
flight while the next is built.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridserve.core.step import ScheduledSequence
from hybridserve.engine.sampling_input import SamplingInput, SamplingInputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import DTypeLike

    from hybridserve.core.request import Request
    from hybridserve.core.step import ScheduledStep
    from hybridserve.engine.token_masks import TokenMasks

NO_PAIRS = np.zeros((0, 2), dtype=np.int64)


@dataclass(slots=True)
class PromptLogprobsInput:
    """Positions of prompts whose next token's log-probability was asked for."""

    rows: np.ndarray  # [P] int64, flat index of the token before
    targets: np.ndarray  # [P] int64, the prompt token that follows
    num_top: int  # how many most likely tokens to report: the most that any of them asks for


@dataclass(slots=True)
class StepInput:
    """One step for a worker. `T` tokens of `S` sequences laid end to end; see kernels' interfaces for the
    meaning."""

    step_id: int
    input_ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    slot_mapping: np.ndarray  # [T] int64
    query_start: np.ndarray  # [S + 1] int64
    seq_lens: np.ndarray  # [S] int64
    block_table: np.ndarray  # [S, B] int32
    state_slots: np.ndarray  # [S] int64
    has_state: np.ndarray  # [S] bool
    adapter_slots: np.ndarray  # [S] int64, 0 for the base model
    adapter_start: np.ndarray  # [S] int64, the position from which on the adapter is on
    adapter_generations: np.ndarray  # [K, 2] int64: slot, generation of every adapter slot in use
    pending: (
        np.ndarray
    )  # [Q, 2] int64: flat token index, row of the step before whose draw is this token's id
    sampling: SamplingInput | None
    prompt_logprobs: PromptLogprobsInput | None
    state_copies: np.ndarray  # [C, 2] int64: source, destination
    block_copies: np.ndarray  # [D, 2] int64
    state_saves: np.ndarray  # [E, 2] int64: source, destination, after the layers
    block_swaps_out: np.ndarray  # [F, 2] int64: unit of the arena, unit of the host's memory
    state_swaps_out: np.ndarray  # [G, 2] int64
    block_moves: np.ndarray  # [H, 2] int64: source, destination, both of the arena
    state_moves: np.ndarray  # [I, 2] int64
    block_swaps_in: np.ndarray  # [J, 2] int64: unit of the host's memory, unit of the arena
    state_swaps_in: np.ndarray  # [M, 2] int64


@dataclass(slots=True)
class BuiltStep:
    """A step's input, and what rank 0 needs to read its result."""

    input: StepInput
    sample_ids: list[str]
    """[R] the request that each drawn token belongs to."""
    prompt_spans: list[tuple[str, int]]
    """For each request with prompt log-probabilities in this step: its id and how many positions, in row
    order."""


@dataclass(slots=True)
class _Resident:
    """What stays the same, or only grows, while a request holds memory."""

    blocks: np.ndarray = field(default_factory=lambda: np.zeros(8, dtype=np.int32))
    num_blocks: int = 0


PADDING = ScheduledSequence("", 0, 1, (), False, (), 0)


class _Column:
    """What a column of the steps says, as an array: made when that is something else than before."""

    def __init__(self, dtype: DTypeLike) -> None:
        self._values: tuple[int, ...] = ()
        self._array = np.zeros(0, dtype=dtype)

    def array(self, values: tuple[int, ...]) -> np.ndarray:
        if values != self._values:
            self._values, self._array = values, np.array(values, dtype=self._array.dtype)
        return self._array.copy()


@dataclass(slots=True)
class _Lengths:
    """What follows from how many tokens each sequence computes."""

    lengths: tuple[int, ...] = ()
    query_start: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    row: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[T] the sequence of each token, and `place` the token's place in its chunk."""
    place: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @classmethod
    def of(cls, lengths: tuple[int, ...]) -> _Lengths:
        query_start = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start[1:])
        row = np.repeat(np.arange(len(lengths)), lengths)
        return cls(lengths, query_start, row, np.arange(query_start[-1]) - query_start[row])


class InputBuilder:
    """Builds a `StepInput` from a `ScheduledStep`. `seed` is what requests without a seed of their own draw
    from.

    `masks` knows what requests may draw that may not draw everything. With `buckets`, a step is padded to the
    next larger bucket of tokens by sequences of one token that live in the null block and the null slot (D8);
    captured graphs need that.
    """

    def __init__(
        self,
        *,
        block_size: int,
        seed: int,
        eos_token_ids: Sequence[int] = (),
        buckets: Sequence[int] = (),
        masks: TokenMasks | None = None,
    ) -> None:
        self.sampling = SamplingInputs(seed, eos_token_ids, masks)
        self._block_size = block_size
        self._buckets = sorted(buckets)
        self._resident: dict[str, _Resident] = {}
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._table_ids: tuple[str, ...] = ()
        self._table_blocks: tuple[tuple[int, ...], ...] = ()
        """The last step's block table, whose rows these are, and what is in them."""
        self._lengths = _Lengths()
        self._state_slots, self._has_state = _Column(np.int64), _Column(np.bool_)
        self._adapter_slots, self._adapter_start = _Column(np.int64), _Column(np.int64)
        self._write_from = _Column(np.int64)
        self._previous_rows: dict[str, int] = {}
        self._num_prompt_scored: dict[str, int] = {}

    def build(self, step: ScheduledStep, requests: Mapping[str, Request]) -> BuiltStep:
        for request_id in (*step.finished, *step.moved):
            self._resident.pop(request_id, None)
            self._table_ids = ()  # one that is back, or was moved, has other blocks
        for request_id in [i for i in self._num_prompt_scored if i not in requests]:
            del self._num_prompt_scored[request_id]
        rows = [*step.sequences, *[PADDING] * self._num_padding(step)]
        columns: Any = ScheduledSequence._make(zip(*rows, strict=True))  # of each field, all its values
        lengths = self._lengths
        if columns.length != lengths.lengths:
            lengths = self._lengths = _Lengths.of(columns.length)
        starts = np.array(columns.start, dtype=np.int64)
        positions = starts[lengths.row] + lengths.place
        seq_lens = starts + np.diff(lengths.query_start)
        block_table = self._block_table(columns.request_id, columns.block_ids)
        slot_mapping = np.zeros_like(positions)
        if block_table.shape[1]:  # else no layer has blocks
            block, place = np.divmod(positions, self._block_size)
            slot_mapping = block_table[lengths.row, block].astype(np.int64) * self._block_size + place
            if any(columns.write_from):
                slot_mapping[positions < self._write_from.array(columns.write_from)[lengths.row]] = 0
        computed = [requests[sequence.request_id] for sequence in step.sequences]
        input_ids, pending = self._tokens(computed, columns.start, columns.length)
        sampling, sample_ids = self.sampling.build(columns.samples, requests, lengths.query_start, seq_lens)
        prompt_logprobs, prompt_spans = self._prompt_logprobs(step.sequences, computed, lengths.query_start)
        step_input = StepInput(
            step_id=step.step_id,
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=lengths.query_start.copy(),
            seq_lens=seq_lens,
            block_table=block_table,
            state_slots=self._state_slots.array(columns.state_slot),
            has_state=self._has_state.array(columns.has_state),
            adapter_slots=self._adapter_slots.array(columns.adapter_slot),
            adapter_start=self._adapter_start.array(columns.adapter_start),
            adapter_generations=_pairs(step.adapter_generations),
            pending=pending,
            sampling=sampling,
            prompt_logprobs=prompt_logprobs,
            state_copies=_pairs(step.state_copies),
            block_copies=_pairs(step.block_copies),
            state_saves=_pairs(step.state_saves),
            block_swaps_out=_pairs(step.swaps_out.blocks),
            state_swaps_out=_pairs(step.swaps_out.slots),
            block_moves=_pairs(step.moves.blocks),
            state_moves=_pairs(step.moves.slots),
            block_swaps_in=_pairs(step.swaps_in.blocks),
            state_swaps_in=_pairs(step.swaps_in.slots),
        )
        self._previous_rows = dict(zip(sample_ids, itertools.count()))
        return BuiltStep(step_input, sample_ids, prompt_spans)

    def reset(self, num_prompt_scored: Mapping[str, int]) -> None:
        """Forget steps whose results never came. The argument: by request, prompt positions whose did."""
        self._previous_rows = {}
        self._num_prompt_scored = dict(num_prompt_scored)

    def _num_padding(self, step: ScheduledStep) -> int:
        if not self._buckets:
            return 0
        num_tokens = step.num_tokens
        return next((bucket - num_tokens for bucket in self._buckets if bucket >= num_tokens), 0)

    def _block_table(self, ids: tuple[str, ...], blocks: tuple[tuple[int, ...], ...]) -> np.ndarray:
        """[S, B]; 0, the null block, beyond each sequence's blocks."""
        if ids == self._table_ids and blocks == self._table_blocks:
            return self._table.copy()
        width = max(map(len, blocks))
        is_known = ids == self._table_ids and width == self._table.shape[1]
        table = self._table.copy() if is_known else np.zeros((len(ids), width), dtype=np.int32)
        for place, (request_id, block_ids) in enumerate(zip(ids, blocks, strict=True)):
            resident = self._resident.get(request_id)
            if resident is None:
                resident = self._resident[request_id] = _Resident()
            num_blocks, known = len(block_ids), resident.num_blocks
            if num_blocks > known:
                if num_blocks > len(resident.blocks):
                    resident.blocks = np.resize(resident.blocks, 2 * num_blocks)
                resident.blocks[known:num_blocks] = block_ids[known:]
                resident.num_blocks = num_blocks
            elif is_known:
                continue
            table[place, :num_blocks] = resident.blocks[:num_blocks]
        self._table, self._table_ids, self._table_blocks = table, ids, blocks
        return table.copy()

    def _tokens(
        self, computed: Sequence[Request], starts: Sequence[int], lengths: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids [T], and which of them are not known yet. `computed`: the requests, without padding."""
        input_ids: list[int] = []
        pending = []
        for request, start, length in zip(computed, starts, lengths, strict=False):
            num_prompt, output_ids = len(request.prompt_ids), request.output_ids
            num_known = num_prompt + len(output_ids)
            end = start + length
            if end > num_known:
                pending.append((len(input_ids) + length - 1, self._previous_rows[request.id]))
                input_ids += request.token_ids(start, num_known)
                input_ids.append(0)
            elif length == 1 and start >= num_prompt:  # a decode: most of them are
                input_ids.append(output_ids[start - num_prompt])
            else:
                input_ids += request.token_ids(start, end)
        padding = len(lengths) - len(computed)
        return np.array([*input_ids, *[0] * padding], dtype=np.int64), _pairs(pending)

    def _prompt_logprobs(
        self, sequences: Sequence[ScheduledSequence], computed: Sequence[Request], query_start: np.ndarray
    ) -> tuple[PromptLogprobsInput | None, list[tuple[str, int]]]:
        rows: list[int] = []
        targets: list[int] = []
        spans: list[tuple[str, int]] = []
        num_top = 0
        for row, request in enumerate(computed):
            if request.params.prompt_logprobs is None or request.index > 0:
                continue
            start, length = sequences[row].start, sequences[row].length
            # a recomputed prompt is not scored again
            begin = max(start, self._num_prompt_scored.get(request.id, 0))
            end = min(start + length, request.num_prompt - 1)
            if begin >= end:
                continue
            first = int(query_start[row]) - start
            rows += range(first + begin, first + end)
            targets += request.prompt_ids[begin + 1 : end + 1]
            spans.append((request.id, end - begin))
            self._num_prompt_scored[request.id] = end
            num_top = max(num_top, request.params.prompt_logprobs)
        if not rows:
            return None, []
        return PromptLogprobsInput(np.array(rows), np.array(targets), num_top), spans


def _pairs(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """[N, 2] int64."""
    return np.array(pairs, dtype=np.int64).reshape(-1, 2) if pairs else NO_PAIRS
