"""Which tokens a sequence may draw next: a list that never changes, or what its grammar says.

Knows requests, matchers and bits; knows neither how grammars are written nor tensors. A mask has a bit for
each token of the vocabulary: token t is bit t % 32 of word t // 32. Masks of grammars are computed in a
thread of their own, beside the forward pass of the step that they are for: whoever reads them waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hybridserve.engine.job_thread import JobThread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Future

    from llguidance import LLMatcher

    from hybridserve.core.request import Request

REFUSED = "structured_outputs: the grammar refuses the token that was drawn"
NO_TOKEN = "structured_outputs: the grammar allows no token of the vocabulary"
CLOSE_SECONDS = 1.0


class AllowedInput:
    """The rows of a step that may draw only some tokens."""

    def __init__(self, rows: np.ndarray, masks: np.ndarray, pending: Future[None] | None = None) -> None:
        self.rows = rows  # [A] int64, row into R
        self._masks = masks
        self._pending = pending

    @property
    def masks(self) -> np.ndarray:
        """[A, ceil(V / 32)] int32, at least one bit in each row. Waits until they are computed."""
        if self._pending is not None:
            self._pending.result()
        return self._masks


@dataclass(slots=True)
class _Follower:
    """A matcher that follows one sequence, and how many of its output tokens it has seen."""

    matcher: LLMatcher
    num_seen: int = 0
    error: str | None = None
    """Why the sequence can't go on."""


@dataclass(slots=True)
class _Job:
    follower: _Follower
    mask: np.ndarray
    banned: Collection[int]


class TokenMasks:
    """Of one engine; not thread-safe. What it holds of a sequence is dropped with `forget`."""

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self.eos_token_ids = frozenset(eos_token_ids)
        self._grammars: dict[str, LLMatcher] = {}
        """By the id that a request came with: a matcher at the beginning, which its continuations copy."""
        self._lists: dict[str, np.ndarray] = {}
        self._followers: dict[str, _Follower] = {}
        self._thread: JobThread | None = None
        self._pending: Future[None] | None = None

    def begin(self, request: Request, grammar: LLMatcher) -> None:
        """What a request with structured_outputs follows. Before its first draw."""
        self._grammars[request.id] = grammar

    def forget(self, request: Request, *, is_last: bool) -> None:
        """A sequence has ended. `is_last`: so have all other continuations of its request."""
        self._followers.pop(request.id, None)
        if is_last:
            self._grammars.pop(_family(request), None)
            self._lists.pop(_family(request), None)

    def reset(self) -> None:
        """Forget steps whose results never came."""
        if self._pending is not None:
            self._pending.exception()  # a matcher must not be used by two threads

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close(CLOSE_SECONDS)

    def build(
        self, drawing: Sequence[Request], stop_tokens: Callable[[int], Collection[int]]
    ) -> AllowedInput | None:
        """For the rows of a step, in order; None if all of them may draw anything. `stop_tokens(row)`: those
        that may not be drawn as long as there are others."""
        rows = [row for row, request in enumerate(drawing) if request.params.is_restricted]
        if not rows:
            return None
        masks = np.zeros((len(rows), self._num_words), dtype=np.int32)
        jobs = []
        for mask, row in zip(masks, rows, strict=True):
            request, banned = drawing[row], stop_tokens(row)
            if request.params.allowed_token_ids is not None:
                mask[:] = self._list(request, request.params.allowed_token_ids)
                _remove(mask, banned)
            else:
                if request.params.ignore_eos:
                    banned = {*banned, *self.eos_token_ids}
                jobs.append(_Job(self._follow(request), mask, banned))
        if not jobs:
            return AllowedInput(np.array(rows), masks)
        self._thread = self._thread or JobThread("hybridserve-masks")
        self._pending = self._thread.submit(partial(_compute, jobs, self._vocab_size))
        return AllowedInput(np.array(rows), masks, self._pending)

    def accept(self, request: Request, token: int) -> tuple[bool, str | None]:
        """Follow a request with structured_outputs to the token that it has just drawn, which is not among
        its output yet. Returns whether nothing may come after it, and why the request can't go on, if it
        can't."""
        follower = self._followers[request.id]
        if follower.error is None:
            if not follower.matcher.consume_token(token):
                follower.error = REFUSED
            follower.num_seen += 1
        return follower.error is None and follower.matcher.is_stopped(), follower.error

    def _follow(self, request: Request) -> _Follower:
        """Its matcher, after all of its output."""
        follower = self._followers.get(request.id)
        if follower is None:
            matcher = self._grammars[_family(request)].deep_copy()
            follower = self._followers[request.id] = _Follower(matcher)
        num_output = len(request.output_ids)
        if follower.num_seen != num_output and follower.error is None:  # it saw a token that never counted
            follower.matcher.reset()
            if not follower.matcher.consume_tokens(request.output_ids):
                follower.error = REFUSED
            follower.num_seen = num_output
        return follower

    def _list(self, request: Request, token_ids: Sequence[int]) -> np.ndarray:
        family = _family(request)
        if family not in self._lists:
            bits = np.zeros(32 * self._num_words, dtype=np.uint8)
            bits[list(token_ids)] = 1
            self._lists[family] = np.packbits(bits, bitorder="little").view(np.int32)
        return self._lists[family]


def _family(request: Request) -> str:
    return request.parent_id or request.id


def _compute(jobs: Sequence[_Job], vocab_size: int) -> None:
    for job in jobs:
        follower = job.follower
        if follower.error is None:
            try:
                follower.error = _fill(job.mask, follower.matcher, vocab_size)
            except Exception as error:  # one sequence's, whatever it is
                follower.error = f"structured_outputs: {type(error).__name__}"
        if follower.error is not None:
            job.mask[:] = -1  # what is drawn will be dropped
        else:
            _remove(job.mask, job.banned)


def _fill(mask: np.ndarray, matcher: LLMatcher, vocab_size: int) -> str | None:
    """Returns why there is none, if so."""
    words = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
    if matcher.is_error():
        return f"structured_outputs: {matcher.stop_reason()}"
    mask[:] = words[: len(mask)]  # the tokenizer may know more tokens than the model
    if vocab_size % 32:
        mask[-1:].view(np.uint32)[:] &= np.uint32((1 << vocab_size % 32) - 1)
    return None if mask.any() else NO_TOKEN


def _remove(mask: np.ndarray, token_ids: Collection[int]) -> None:
    """Unless nothing would be left."""
    if not token_ids:
        return
    kept = mask.copy()
    for token in token_ids:
        kept.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    if kept.any():
        mask[:] = kept
