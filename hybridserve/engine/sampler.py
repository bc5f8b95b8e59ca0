"""Draws tokens from logits, many rows at once. Knows tensors; does not know requests. What of a distribution
may be drawn is a backend's to find.

No row's result depends on the other rows: what is kept is decided by values, never by positions in a sort
that ties could reorder, and the draw walks the vocabulary in its own order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hybridserve.engine.input_builder import BANNED, PenaltyInput, SamplingInput
from hybridserve.engine.messages import TokenLogprobs

if TYPE_CHECKING:
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


def sample(
    logits: torch.Tensor, sampling: SamplingInput, backend: PointwiseBackend
) -> tuple[torch.Tensor, LogprobsOutput | None]:
    """logits [R, V] float32 (overwritten) -> token ids [R], -1 where a row's logits are not finite."""
    device = logits.device
    finite = torch.isfinite(logits).all(dim=-1)
    scored = sampling.num_logprobs
    wanted = [] if scored is None else (scored >= 0).nonzero()[0].tolist()
    raw = logits[wanted]
    if sampling.bias is not None:
        rows, tokens, values = (torch.from_numpy(column).to(device) for column in sampling.bias)
        logits.index_put_((rows, tokens), values, accumulate=True).clamp_(min=BANNED)
    if sampling.penalties is not None:
        _apply_penalties(logits, sampling.penalties)
    if sampling.allowed is not None:
        _keep_allowed(logits, sampling.allowed)
    token_ids = logits.argmax(dim=-1)
    index = (sampling.temperature > 0).nonzero()[0]
    if len(index):
        drawn = torch.from_numpy(index).to(device)
        token_ids[drawn] = _draw(logits[drawn], sampling, index, backend)
    token_ids.masked_fill_(~finite, -1)
    if scored is None:
        return token_ids, None
    chosen = token_ids[wanted].clamp(min=0)
    return token_ids, logprobs(raw, chosen, int(scored.max()), wanted)


def logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int, rows: list[int]) -> LogprobsOutput:
    """Raw log-probabilities: logits [P, V], chosen token ids [P]."""
    values = torch.log_softmax(logits, dim=-1)
    picked = values.gather(1, chosen[:, None])
    ranks = (values > picked).sum(dim=-1) + 1
    top = values.topk(min(num_top, values.shape[1]), dim=-1)
    return LogprobsOutput(
        rows, picked[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist()
    )


def _apply_penalties(logits: torch.Tensor, penalties: PenaltyInput) -> None:
    """As OpenAI defines presence and frequency; repetition as in CTRL (arXiv 1909.05858, section 4.1)."""
    device = logits.device
    row = torch.from_numpy(penalties.row).to(device)
    token = torch.from_numpy(penalties.token).to(device)
    count = torch.from_numpy(penalties.num_generated).to(device)
    presence, frequency, repetition = (
        torch.from_numpy(column).to(device)[row]
        for column in (penalties.presence, penalties.frequency, penalties.repetition)
    )
    values = logits[row, token]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= presence * (count > 0) + frequency * count
    logits[row, token] = values.clamp(min=BANNED)


def _keep_allowed(logits: torch.Tensor, allowed: AllowedInput) -> None:
    """Nothing else can be drawn, whatever the bias; logits that are banned still can if all of them are."""
    device, vocab_size = logits.device, logits.shape[1]
    # bytes, whose order is that of the words on every machine that this runs on
    masks = torch.from_numpy(allowed.masks.view(np.uint8)).to(device)
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
    refused = ((masks[:, :, None] & bits) == 0).view(len(masks), -1)[:, :vocab_size]
    if len(masks) == len(logits):
        logits.masked_fill_(refused, -torch.inf)
    else:
        rows = torch.from_numpy(allowed.rows).to(device)
        logits[rows] = logits[rows].masked_fill_(refused, -torch.inf)


def _draw(
    logits: torch.Tensor, sampling: SamplingInput, index: np.ndarray, backend: PointwiseBackend
) -> torch.Tensor:
    """Inverse-CDF draw from logits [D, V], the rows `index` of the step, at positive temperature."""
    device = logits.device
    # a temperature near 0 must stay finite; it is greedy then anyway
    temperature = torch.from_numpy(sampling.temperature[index]).to(device).clamp(min=1e-5)
    logits = logits / temperature[:, None]
    probs = torch.softmax(logits, dim=-1)
    if sampling.min_p is not None:
        least = probs.amax(dim=-1) * torch.from_numpy(sampling.min_p[index]).to(device)
        probs.masked_fill_(probs < least[:, None], 0.0)
    if sampling.top_k is not None:
        backend.keep_top_k(probs, torch.from_numpy(sampling.top_k[index]).to(device))
    if sampling.top_p is not None:
        backend.keep_top_p(probs, torch.from_numpy(sampling.top_p[index]).to(device))
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    target = cumulative[:, -1] * torch.from_numpy(sampling.uniform[index]).to(device)
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
