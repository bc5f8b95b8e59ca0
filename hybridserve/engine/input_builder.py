"""Turns a scheduled step into flat arrays: the only thing that crosses from rank 0 to all ranks (D6).

Knows requests and their parameters; does not know tensors or the model. Numbers that repeat every step of a
request (its key for random draws, its row of the block table) are kept between steps and dropped when the
scheduler says that the request's memory is gone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridserve.core.step import ScheduledSequence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from hybridserve.core.request import Request, SamplingParams
    from hybridserve.core.step import ScheduledStep
    from hybridserve.engine.token_masks import AllowedInput, TokenMasks

NO_PAIRS = np.zeros((0, 2), dtype=np.int64)

BANNED = float(np.finfo(np.float32).min)
"""Added to the logit of a token that may not be drawn; finite, so that a row of banned tokens has no NaN."""


@dataclass(slots=True)
class SamplingInput:
    """How `R` tokens are drawn. Columns that no row of the step needs are None."""

    rows: np.ndarray  # [R] int64, flat index of the token whose logits are drawn from
    temperature: np.ndarray  # [R] float32, 0 is greedy
    uniform: np.ndarray  # [R] float64 in [0, 1), the draw
    top_k: np.ndarray | None = None  # [R] int64, 0 is off
    top_p: np.ndarray | None = None  # [R] float32
    min_p: np.ndarray | None = None  # [R] float32
    num_logprobs: np.ndarray | None = None  # [R] int64, -1 is none
    bias: tuple[np.ndarray, np.ndarray, np.ndarray] | None = (
        None  # rows into R, tokens, float32 values to add
    )
    penalties: PenaltyInput | None = None
    allowed: AllowedInput | None = None


@dataclass(slots=True)
class PenaltyInput:
    """Token counts of the rows that have penalties, as triples; a token may stand in several."""

    row: np.ndarray  # [N] int64, row into R
    token: np.ndarray  # [N] int64
    num_generated: np.ndarray  # [N] float32, occurrences in the output; 0 where it stands in the prompt only
    presence: np.ndarray  # [R] float32
    frequency: np.ndarray  # [R] float32
    repetition: np.ndarray  # [R] float32


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


@dataclass(slots=True)
class _Drawing:
    """What stays the same from step to step while the same requests draw."""

    requests: list[Request] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    num_prompt: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    columns: dict[str, Any] = field(default_factory=dict)
    """Of `SamplingInput`, those that are asked for."""
    streams: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    """A hash of (seed, continuation): see `of`."""
    biased: list[int] = field(default_factory=list)
    """Rows whose logits may be added to."""
    has_penalties: bool = False

    def is_of(self, requests: Sequence[Request]) -> bool:
        return len(requests) == len(self.requests) and all(map(operator.is_, requests, self.requests))

    def uniform(self, num_drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """One number in [0, 1) a request, for its next draw after so many."""
        return (_mix(self.streams + num_drawn.astype(np.uint64)) >> np.uint64(32)) / 2.0**32

    @classmethod
    def of(cls, requests: list[Request], seed: int) -> _Drawing:
        """A draw is a hash of (seed, continuation, how many tokens were drawn before), so it depends neither
        on the company in the batch nor on preemption. A request without a seed gets the engine's, and its
        order of arrival as a continuation of its own.
        """
        params = [request.params for request in requests]
        columns = {"temperature": np.array([p.temperature for p in params], dtype=np.float32)}
        if any(p.top_k > 0 for p in params):
            columns["top_k"] = np.array([max(p.top_k, 0) for p in params], dtype=np.int64)
        if any(p.top_p < 1 for p in params):
            columns["top_p"] = np.array([p.top_p for p in params], dtype=np.float32)
        if any(p.min_p > 0 for p in params):
            columns["min_p"] = np.array([p.min_p for p in params], dtype=np.float32)
        if any(p.logprobs is not None for p in params):
            columns["num_logprobs"] = np.array([-1 if p.logprobs is None else p.logprobs for p in params])
        seeds = np.array([seed if p.seed is None else p.seed & (2**64 - 1) for p in params], dtype=np.uint64)
        streams = np.array(
            [r.index + (0 if r.params.seed is not None else (r.arrival_seq + 1) << 16) for r in requests],
            dtype=np.uint64,
        )
        return cls(
            requests,
            [request.id for request in requests],
            np.array([request.num_prompt for request in requests]),
            columns,
            _mix(_mix(seeds) + streams),
            [row for row, p in enumerate(params) if p.logit_bias or p.min_tokens > 0],
            any(p.has_penalties for p in params),
        )


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
        self.masks = masks
        self._block_size = block_size
        self._seed = seed
        self._eos_token_ids = tuple(eos_token_ids)
        self._buckets = sorted(buckets)
        self._resident: dict[str, _Resident] = {}
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._table_ids: list[str] = []
        """The last step's block table, and whose rows these are."""
        self._drawing = _Drawing()
        self._previous_rows: dict[str, int] = {}
        self._num_prompt_scored: dict[str, int] = {}

    def build(self, step: ScheduledStep, requests: Mapping[str, Request]) -> BuiltStep:
        for request_id in (*step.finished, *step.moved):
            self._resident.pop(request_id, None)
            self._table_ids = []  # one that is back, or was moved, has other blocks
        for request_id in [i for i in self._num_prompt_scored if i not in requests]:
            del self._num_prompt_scored[request_id]
        sequences = step.sequences
        rows = [*sequences, *[PADDING] * self._num_padding(step.num_tokens)]
        columns = ScheduledSequence._make(zip(*rows, strict=True))
        starts = np.array(columns.start, dtype=np.int64)
        lengths = np.array(columns.length, dtype=np.int64)
        query_start = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start[1:])
        block_table = self._block_table(rows)
        input_ids, pending = self._tokens(sequences, requests, query_start)
        row = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, lengths)
        slot_mapping = np.zeros_like(positions)
        if block_table.shape[1]:  # else no layer has blocks
            blocks = block_table[row, positions // self._block_size].astype(np.int64)
            slot_mapping = blocks * self._block_size + positions % self._block_size
            write_from = np.array(columns.write_from, dtype=np.int64)
            if write_from.any():
                slot_mapping[positions < np.repeat(write_from, lengths)] = 0
        sampling, sample_ids = self._sampling(sequences, requests, query_start)
        prompt_logprobs, prompt_spans = self._prompt_logprobs(sequences, requests, query_start)
        step_input = StepInput(
            step_id=step.step_id,
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=query_start,
            seq_lens=starts + lengths,
            block_table=block_table,
            state_slots=np.array(columns.state_slot, dtype=np.int64),
            has_state=np.array(columns.has_state, dtype=np.bool_),
            adapter_slots=np.array(columns.adapter_slot, dtype=np.int64),
            adapter_start=np.array(columns.adapter_start, dtype=np.int64),
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
        self._previous_rows = {request_id: row for row, request_id in enumerate(sample_ids)}
        return BuiltStep(step_input, sample_ids, prompt_spans)

    def reset(self, num_prompt_scored: Mapping[str, int]) -> None:
        """Forget steps whose results never came. The argument: by request, prompt positions whose did."""
        self._previous_rows = {}
        self._num_prompt_scored = dict(num_prompt_scored)

    def _num_padding(self, num_tokens: int) -> int:
        return next((bucket - num_tokens for bucket in self._buckets if bucket >= num_tokens), 0)

    def _block_table(self, rows: Sequence[ScheduledSequence]) -> np.ndarray:
        """[S, B]; 0, the null block, beyond each sequence's blocks."""
        width = max(len(row.block_ids) for row in rows)
        ids = [row.request_id for row in rows]
        is_known = ids == self._table_ids and width == self._table.shape[1]
        table = self._table.copy() if is_known else np.zeros((len(rows), width), dtype=np.int32)
        for place, row in enumerate(rows):
            resident = self._resident.get(row.request_id)
            if resident is None:
                resident = self._resident[row.request_id] = _Resident()
            num_blocks, known = len(row.block_ids), resident.num_blocks
            if num_blocks > known:
                if num_blocks > len(resident.blocks):
                    resident.blocks = np.resize(resident.blocks, 2 * num_blocks)
                resident.blocks[known:num_blocks] = row.block_ids[known:]
                resident.num_blocks = num_blocks
            elif is_known:
                continue
            table[place, :num_blocks] = resident.blocks[:num_blocks]
        self._table, self._table_ids = table, ids
        return table

    def _tokens(
        self, sequences: Sequence[ScheduledSequence], requests: Mapping[str, Request], query_start: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        input_ids: list[int] = []
        pending = []
        for seq in sequences:
            request = requests[seq.request_id]
            end = seq.start + seq.length
            if end > request.num_known:
                pending.append((len(input_ids) + seq.length - 1, self._previous_rows[seq.request_id]))
                input_ids += request.token_ids(seq.start, request.num_known)
                input_ids.append(0)
            else:
                input_ids += request.token_ids(seq.start, end)
        padded = np.zeros(query_start[-1], dtype=np.int64)
        padded[: len(input_ids)] = input_ids
        return padded, np.array(pending, dtype=np.int64).reshape(-1, 2)

    def _sampling(
        self, sequences: Sequence[ScheduledSequence], requests: Mapping[str, Request], query_start: np.ndarray
    ) -> tuple[SamplingInput | None, list[str]]:
        row_of = [row for row, seq in enumerate(sequences) for _ in seq.samples]
        if not row_of:
            return None, []
        drawn = [requests[request_id] for seq in sequences for request_id in seq.samples]
        drawing = self._drawing
        if not drawing.is_of(drawn):
            drawing = self._drawing = _Drawing.of(drawn, self._seed)
        ends = np.array([sequences[row].start + sequences[row].length for row in row_of])
        num_drawn = ends - drawing.num_prompt
        sampling = SamplingInput(
            rows=query_start[1:][row_of] - 1,
            uniform=drawing.uniform(num_drawn),
            bias=self._bias(drawing, num_drawn),
            penalties=_penalties(drawn) if drawing.has_penalties else None,
            **drawing.columns,
        )
        if self.masks is not None:
            sampling.allowed = self.masks.build(
                drawn, lambda row: self._too_early(drawn[row].params, num_drawn[row])
            )
        return sampling, drawing.ids

    def _bias(
        self, drawing: _Drawing, num_drawn: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        rows: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        for row in drawing.biased:
            params = drawing.requests[row].params
            if params.logit_bias:
                rows += [row] * len(params.logit_bias)
                tokens += params.logit_bias.keys()
                values += (max(value, BANNED) for value in params.logit_bias.values())
            if not params.is_restricted and (banned := self._too_early(params, num_drawn[row])):
                rows += [row] * len(banned)
                tokens += banned
                values += [BANNED] * len(banned)
        if not rows:
            return None
        return np.array(rows), np.array(tokens), np.array(values, dtype=np.float32)

    def _too_early(self, params: SamplingParams, num_drawn: int) -> set[int]:
        """Tokens that would end a sequence and may not yet."""
        if num_drawn >= params.min_tokens:
            return set()
        return {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}

    def _prompt_logprobs(
        self, sequences: Sequence[ScheduledSequence], requests: Mapping[str, Request], query_start: np.ndarray
    ) -> tuple[PromptLogprobsInput | None, list[tuple[str, int]]]:
        rows: list[int] = []
        targets: list[int] = []
        spans: list[tuple[str, int]] = []
        num_top = 0
        for row, seq in enumerate(sequences):
            request = requests[seq.request_id]
            if request.params.prompt_logprobs is None or request.index > 0:
                continue
            # a recomputed prompt is not scored again
            begin = max(seq.start, self._num_prompt_scored.get(request.id, 0))
            end = min(seq.start + seq.length, request.num_prompt - 1)
            if begin >= end:
                continue
            first = int(query_start[row]) - seq.start
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


def _penalties(requests: Sequence[Request]) -> PenaltyInput:
    rows, tokens, counts = [], [], []
    for row, request in enumerate(requests):
        if not request.params.has_penalties:
            continue
        generated, occurrences = np.unique(np.array(request.output_ids, dtype=np.int64), return_counts=True)
        prompt_only = np.setdiff1d(np.array(request.prompt_ids, dtype=np.int64), generated)
        tokens += [generated, prompt_only]
        counts += [occurrences, np.zeros(len(prompt_only))]
        rows.append(np.full(len(generated) + len(prompt_only), row))
    params = [request.params for request in requests]
    return PenaltyInput(
        row=np.concatenate(rows),
        token=np.concatenate(tokens),
        num_generated=np.concatenate(counts).astype(np.float32),
        presence=np.array([p.presence_penalty for p in params], dtype=np.float32),
        frequency=np.array([p.frequency_penalty for p in params], dtype=np.float32),
        repetition=np.array([p.repetition_penalty for p in params], dtype=np.float32),
    )


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014) after its increment."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
