"""How a step's tokens are drawn, as arrays. Knows requests and their parameters; does not know what they have
computed, nor who draws.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from hybridserve.core.request import Request, SamplingParams
    from hybridserve.engine.token_masks import AllowedInput, TokenMasks

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
class Drawing:
    """What stays the same from step to step while the same requests draw."""

    requests: list[Request] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    num_prompt: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    columns: dict[str, Any] = field(default_factory=dict)
    """Of `SamplingInput`, those that are asked for; a step gets copies."""
    streams: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    """A hash of (seed, continuation): see `of`."""
    biased: list[int] = field(default_factory=list)
    """Rows whose logits may be added to."""
    has_penalties: bool = False
    is_restricted: bool = False
    """Some may not draw just anything."""

    def is_of(self, requests: Mapping[str, Request]) -> bool:
        """Whether these ids still are these requests."""
        return all(map(operator.is_, map(requests.get, self.ids), self.requests))

    def uniform(self, num_drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """One number in [0, 1) a request, for its next draw after so many."""
        return (_mix(self.streams + num_drawn.astype(np.uint64)) >> np.uint64(32)) / 2.0**32

    @classmethod
    def of(cls, requests: list[Request], seed: int) -> Drawing:
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
            any(p.is_restricted for p in params),
        )


class SamplingInputs:
    """Builds a step's `SamplingInput`; see `InputBuilder`."""

    def __init__(self, seed: int, eos_token_ids: Sequence[int], masks: TokenMasks | None) -> None:
        self.masks = masks
        self._seed = seed
        self._eos_token_ids = tuple(eos_token_ids)
        self._drawing = Drawing()
        self._samples: tuple[tuple[str, ...], ...] = ()
        self._row_of = np.zeros(0, dtype=np.int64)
        """The last step's `samples`, and the sequence that each draw is of."""

    def build(
        self,
        samples: tuple[tuple[str, ...], ...],
        requests: Mapping[str, Request],
        query_start: np.ndarray,
        seq_lens: np.ndarray,
    ) -> tuple[SamplingInput | None, list[str]]:
        """For a step whose sequences have these `ScheduledSequence.samples`; with the ids of those who draw,
        [R]."""
        if samples != self._samples or not self._drawing.is_of(requests):
            drawn = [requests[request_id] for ids in samples for request_id in ids]
            self._drawing = Drawing.of(drawn, self._seed)
            self._samples = samples
            rows = [row for row, ids in enumerate(samples) for _ in ids]
            self._row_of = np.array(rows, dtype=np.int64)
        drawing, row_of = self._drawing, self._row_of
        if not drawing.ids:
            return None, []
        num_drawn = seq_lens[row_of] - drawing.num_prompt
        sampling = SamplingInput(
            rows=query_start[1:][row_of] - 1,
            uniform=drawing.uniform(num_drawn),
            bias=self._bias(drawing, num_drawn),
            penalties=_penalties(drawing.requests) if drawing.has_penalties else None,
            **{name: column.copy() for name, column in drawing.columns.items()},
        )
        if drawing.is_restricted and self.masks is not None:
            sampling.allowed = self.masks.build(
                drawing.requests,
                lambda row: self._too_early(drawing.requests[row].params, num_drawn[row]),
            )
        return sampling, drawing.ids

    def _bias(
        self, drawing: Drawing, num_drawn: np.ndarray
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
