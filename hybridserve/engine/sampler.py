"""Draws tokens from logits, many rows at once: what changes the logits before, and what is told of them
after. Knows tensors; does not know requests. The draw itself is a backend's.

No row's result depends on the other rows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hybridserve.engine.messages import TokenLogprobs
from hybridserve.engine.sampling_input import BANNED, PenaltyInput, SamplingInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridserve.engine.staging import Put
    from hybridserve.engine.token_masks import AllowedInput
    from hybridserve.kernels.pointwise.interface import PointwiseBackend


@dataclass(slots=True)
class LogprobsOutput:
    """Log-probabilities of the raw distribution at `P` rows."""

    rows: list[int]  # [P] which of the step's rows these are
    chosen: list[float]  # [P] of the token that stands there
    ranks: list[int]  # [P] its place among all tokens, from 1
    top_ids: list[list[int]]  # [P][k] most likely tokens, best first
    top_values: list[list[float]]  # [P][k]

    @classmethod
    def concatenate(cls, parts: list[LogprobsOutput]) -> LogprobsOutput:
        columns = [[getattr(part, column) for part in parts] for column in cls.__slots__]
        return cls(*(list(itertools.chain.from_iterable(column)) for column in columns))

    def at(self, place: int, token_id: int, num_top: int) -> TokenLogprobs:
        """The `place`-th row's, for the token that stands there, with `num_top` most likely ones."""
        return TokenLogprobs(
            token_ids=[token_id, *self.top_ids[place][:num_top]],
            logprobs=[self.chosen[place], *self.top_values[place][:num_top]],
            rank=self.ranks[place],
        )


@dataclass(slots=True)
class Scores:
    """A `LogprobsOutput` that is still where it was computed, or on its way from there."""

    rows: list[int]
    chosen: torch.Tensor  # [P]
    ranks: torch.Tensor  # [P]
    top_ids: torch.Tensor  # [P, k]
    top_values: torch.Tensor  # [P, k]

    def fetched(self, fetch: Callable[[torch.Tensor], torch.Tensor]) -> Scores:
        """With each tensor as `fetch` gives it back."""
        tensors = (self.chosen, self.ranks, self.top_ids, self.top_values)
        return Scores(self.rows, *map(fetch, tensors))

    def output(self) -> LogprobsOutput:
        """Waits for a device that they are on."""
        tensors = (self.chosen, self.ranks, self.top_ids, self.top_values)
        return LogprobsOutput(self.rows, *(tensor.tolist() for tensor in tensors))


@dataclass(slots=True)
class Draws:
    """A `SamplingInput` on the device. Made before the model runs, so that nothing has to be waited for after
    it; but masks of grammars are computed while it runs, and brought by `late`."""

    rows: torch.Tensor  # [R]
    scored: list[int]
    """Rows whose log-probabilities are wanted."""
    scored_rows: torch.Tensor | None
    """[P] the same; None: none are."""
    num_top: int
    bias: tuple[torch.Tensor, ...] | None
    penalties: _Penalties | None
    allowed: AllowedInput | None
    late: Put
    drawn: torch.Tensor | None
    """[D] rows whose temperature is above 0; None: there are none. The rest is of these alone."""
    temperature: torch.Tensor | None = None
    uniform: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None


class _Penalties(NamedTuple):
    """`PenaltyInput` on the device."""

    row: torch.Tensor
    token: torch.Tensor
    num_generated: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


class _Allowed(NamedTuple):
    rows: torch.Tensor | None
    """Which have a mask; None: all."""
    masks: torch.Tensor  # [A, bytes] uint8


def prepare(sampling: SamplingInput, put: Put, late: Put) -> Draws:
    """`put` brings an array to the device, `late` does so while the device is at work."""
    num_logprobs, bias, penalties = sampling.num_logprobs, sampling.bias, sampling.penalties
    scored = np.zeros(0, dtype=np.int64) if num_logprobs is None else (num_logprobs >= 0).nonzero()[0]
    draws = Draws(
        rows=put(sampling.rows),
        scored=scored.tolist(),
        scored_rows=None if num_logprobs is None else put(scored),
        num_top=0 if num_logprobs is None else int(num_logprobs.max()),
        bias=None if bias is None else tuple(map(put, bias)),
        penalties=None if penalties is None else _penalties(penalties, put),
        allowed=sampling.allowed,
        late=late,
        drawn=None,
    )
    index = (sampling.temperature > 0).nonzero()[0]
    if len(index):
        draws.drawn = put(index)
        for name in ("temperature", "uniform", "min_p", "top_k", "top_p"):
            column: np.ndarray | None = getattr(sampling, name)
            if column is not None:
                setattr(draws, name, put(column[index]))
    return draws


def _penalties(penalties: PenaltyInput, put: Put) -> _Penalties:
    return _Penalties(*(put(getattr(penalties, name)) for name in _Penalties._fields))


def sample(
    logits: torch.Tensor, draws: Draws, backend: PointwiseBackend
) -> tuple[torch.Tensor, Scores | None]:
    """logits [R, V] float32 (overwritten) -> token ids [R], -1 where a row's logits are not finite."""
    token_ids, finite = backend.argmax(logits)
    raw = None if draws.scored_rows is None else logits[draws.scored_rows]
    if draws.bias is not None:
        rows, tokens, values = draws.bias
        logits.index_put_((rows, tokens), values, accumulate=True).clamp_(min=BANNED)
    if draws.penalties is not None:
        _apply_penalties(logits, draws.penalties)
    if draws.allowed is not None:
        # bytes, whose order is that of the words on every machine that this runs on
        masks = draws.allowed.masks.view(np.uint8)
        rows_of_masks = None if len(masks) == len(logits) else draws.late(draws.allowed.rows)
        _keep_allowed(logits, _Allowed(rows_of_masks, draws.late(masks)))
    if draws.bias is not None or draws.penalties is not None or draws.allowed is not None:
        token_ids, _ = backend.argmax(logits)
    if draws.drawn is not None:
        assert draws.temperature is not None
        assert draws.uniform is not None
        token_ids[draws.drawn] = backend.draw(
            logits,
            draws.drawn,
            draws.temperature,
            draws.uniform,
            min_p=draws.min_p,
            top_k=draws.top_k,
            top_p=draws.top_p,
        )
    token_ids.masked_fill_(~finite, -1)
    if raw is None:
        return token_ids, None
    return token_ids, logprobs(raw, token_ids[draws.scored_rows].clamp(min=0), draws.num_top, draws.scored)


def logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int, rows: list[int]) -> Scores:
    """Raw log-probabilities: logits [P, V], chosen token ids [P]."""
    values = torch.log_softmax(logits, dim=-1)
    picked = values.gather(1, chosen[:, None])
    ranks = (values > picked).sum(dim=-1) + 1
    top = values.topk(min(num_top, values.shape[1]), dim=-1)
    return Scores(rows, picked[:, 0], ranks, top.indices, top.values)


def _apply_penalties(logits: torch.Tensor, penalties: _Penalties) -> None:
    """As OpenAI defines presence and frequency; repetition as in CTRL (arXiv 1909.05858, section 4.1)."""
    row, token, count = penalties.row, penalties.token, penalties.num_generated
    presence, frequency, repetition = (
        column[row] for column in (penalties.presence, penalties.frequency, penalties.repetition)
    )
    values = logits[row, token]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= presence * (count > 0) + frequency * count
    logits[row, token] = values.clamp(min=BANNED)


def _keep_allowed(logits: torch.Tensor, allowed: _Allowed) -> None:
    """Nothing else can be drawn, whatever the bias; logits that are banned still can if all of them are."""
    masks, vocab_size = allowed.masks, logits.shape[1]
    bits = torch.bitwise_left_shift(1, torch.arange(8, dtype=torch.uint8, device=logits.device))
    refused = ((masks[:, :, None] & bits) == 0).view(len(masks), -1)[:, :vocab_size]
    if allowed.rows is None:
        logits.masked_fill_(refused, -torch.inf)
    else:
        logits[allowed.rows] = logits[allowed.rows].masked_fill_(refused, -torch.inf)
