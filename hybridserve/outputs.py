"""From token ids to what a user sees: text, stop strings, log-probabilities, requests with all their
continuations.

The client side of an engine core: knows text, runs no model. One instance serves any number of requests at
once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridserve.core.request import FinishReason
from hybridserve.engine.messages import EngineRequest, RequestMetrics, SequenceOutput, TokenLogprobs
from hybridserve.text import IncrementalDetokenizer, StopChecker, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable


class StreamAborted(RuntimeError):
    """The engine gave up the sequence that a stream comes from; what was yielded until then is good."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the raw distribution; `rank` 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str | None


PROMPT_TAIL = 4
"""Tokens that the last character of a prompt may be spread over: one for each byte of it, at most."""

Logprobs = dict[int, Logprob]
"""Token id -> log-probability, at one position: the token that stands there first, then the most likely
ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and its continuations, in order of index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    adapter: str | None
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None = None
    metrics: RequestMetrics | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one continuation. `text` is what may be shown: never half a character, never the
    beginning of a stop string."""

    request_id: str
    index: int
    text: str
    finished: bool
    """Whether the whole request is now finished."""


@dataclass(slots=True)
class _Continuation:
    output: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    stop: StopChecker
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class _Tracked:
    output: RequestOutput
    continuations: list[_Continuation]
    min_tokens: int


class OutputProcessor:
    """Collects what an engine emits. Without a tokenizer texts stay empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._tracked: dict[str, _Tracked] = {}

    def add(self, request: EngineRequest, prompt: str | None) -> None:
        params = request.params
        continuations = [
            _Continuation(
                CompletionOutput(index, logprobs=None if params.logprobs is None else []),
                self._detokenizer(request.prompt_ids),
                StopChecker(params.stop),
            )
            for index in range(params.n)
        ]
        if params.logprobs is not None:
            for continuation in continuations:
                continuation.output.cumulative_logprob = 0.0
        output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_ids,
            adapter=request.adapter,
            outputs=[continuation.output for continuation in continuations],
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        self._tracked[request.request_id] = _Tracked(output, continuations, params.min_tokens)

    def _detokenizer(self, prompt_ids: list[int]) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        detokenizer = self._tokenizer.detokenizer()
        for token_id in prompt_ids[-PROMPT_TAIL:]:  # a prompt of ids may end inside a character
            detokenizer.push(token_id)
        return detokenizer

    def take(self, request_id: str) -> RequestOutput:
        """Hand a request over and forget it; what the engine still says about it is ignored."""
        return self._tracked.pop(request_id).output

    def discard(self, request_id: str) -> None:
        self._tracked.pop(request_id, None)

    def process(self, outputs: Iterable[SequenceOutput]) -> tuple[list[Delta], list[tuple[str, int]]]:
        """Returns what was added, and the continuations (request id, index) that a stop string ended and that
        the engine must abort."""
        deltas: list[Delta] = []
        aborts: list[tuple[str, int]] = []
        for output in outputs:
            tracked = self._tracked.get(output.request_id)
            if tracked is None:
                continue
            continuation = tracked.continuations[output.index]
            if output.prompt_logprobs is not None and tracked.output.prompt_logprobs is not None:
                tracked.output.prompt_logprobs += map(self._logprobs, output.prompt_logprobs)
            if output.metrics is not None:
                continuation.metrics = output.metrics
            text = ""
            if continuation.output.finish_reason is None:
                text = self._advance(tracked, continuation, output)
                if continuation.output.finish_reason is not None and output.finish_reason is None:
                    aborts.append((output.request_id, output.index))
            done = all(c.metrics is not None for c in tracked.continuations)
            if done:
                tracked.output.finished = True
                tracked.output.metrics = _merge_metrics(
                    [c.metrics for c in tracked.continuations if c.metrics]
                )
            if text or done:
                deltas.append(Delta(output.request_id, output.index, text, done))
        return deltas, aborts

    def _advance(self, tracked: _Tracked, continuation: _Continuation, output: SequenceOutput) -> str:
        """Take one continuation's new tokens; returns the text that may now be shown."""
        result, stop = continuation.output, continuation.stop
        shown = ""
        for position, token_id in enumerate(output.token_ids):
            # the token that ends a sequence is part of its ids, not of its text
            ends = output.finish_reason is FinishReason.STOP and position == len(output.token_ids) - 1
            result.token_ids.append(token_id)
            if output.logprobs is not None and result.logprobs is not None:
                result.logprobs.append(self._logprobs(output.logprobs[position]))
                result.cumulative_logprob = (result.cumulative_logprob or 0.0) + output.logprobs[
                    position
                ].logprobs[0]
            if continuation.detokenizer is None or ends:
                continue
            may_stop = len(result.token_ids) >= tracked.min_tokens
            text, matched = stop.push(continuation.detokenizer.push(token_id), may_stop=may_stop)
            shown += text
            if matched is not None:
                result.finish_reason, result.stop_reason = FinishReason.STOP, matched
                result.text += shown
                return shown
        if output.finish_reason is not None:
            result.finish_reason, result.stop_reason = output.finish_reason, output.stop_reason
            if continuation.detokenizer is not None:
                text, matched = stop.push(continuation.detokenizer.flush(), may_stop=True)
                shown += text + ("" if matched is not None else stop.flush())
        result.text += shown
        return shown

    def _logprobs(self, scored: TokenLogprobs) -> Logprobs:
        decode = self._tokenizer.decode_token if self._tokenizer else lambda _: None
        found: Logprobs = {}
        # the first id is the token that stands there; the others are ranked 1, 2, ...
        ranks = [scored.rank, *range(1, len(scored.token_ids))]
        for token_id, logprob, rank in zip(scored.token_ids, scored.logprobs, ranks, strict=True):
            found.setdefault(token_id, Logprob(logprob, rank, decode(token_id)))
        return found


def _merge_metrics(parts: list[RequestMetrics]) -> RequestMetrics:
    """Of a request, from those of its continuations."""

    def first(times: Iterable[float | None]) -> float | None:
        return min((time for time in times if time is not None), default=None)

    return RequestMetrics(
        arrival=min(part.arrival for part in parts),
        first_scheduled=first(part.first_scheduled for part in parts),
        first_token=first(part.first_token for part in parts),
        finished=max(part.finished for part in parts),
        num_cached_tokens=parts[0].num_cached_tokens,
        num_preemptions=sum(part.num_preemptions for part in parts),
    )
