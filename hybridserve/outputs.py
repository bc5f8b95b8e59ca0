"""From token ids to what a user sees: text, stop strings, log-probabilities, requests with all their
continuations.

The client side of an engine core: knows text, runs no model. One instance serves any number of requests at
once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hybridserve.core.request import FinishReason
from hybridserve.engine.messages import RequestMetrics
from hybridserve.text import IncrementalDetokenizer, StopChecker, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from hybridserve.engine.messages import EngineRequest, SequenceOutput, TokenLogprobs


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

    @classmethod
    def empty(cls, request: EngineRequest, prompt: str | None) -> RequestOutput:
        """Of a request of which nothing has come yet."""
        has_logprobs = request.params.logprobs is not None
        return cls(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_ids,
            adapter=request.adapter,
            outputs=[
                CompletionOutput(
                    index,
                    logprobs=[] if has_logprobs else None,
                    cumulative_logprob=0.0 if has_logprobs else None,
                )
                for index in range(request.params.n)
            ],
            prompt_logprobs=None if request.params.prompt_logprobs is None else [None],
        )

    def add(self, delta: Delta) -> None:
        """Grow by what a step has added."""
        completion = self.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if delta.logprobs is not None and completion.logprobs is not None:
            completion.logprobs += delta.logprobs
            total = completion.cumulative_logprob or 0.0
            for position in delta.logprobs:
                total += next(iter(position.values())).logprob
            completion.cumulative_logprob = total
        if delta.prompt_logprobs is not None and self.prompt_logprobs is not None:
            self.prompt_logprobs += delta.prompt_logprobs
        if delta.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.finished:
            self.finished, self.metrics = True, delta.metrics


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one continuation. Each continuation has one delta with a `finish_reason`, and
    each request one that is `finished`, its last."""

    request_id: str
    index: int
    text: str = ""
    """What may be shown: never half a character, never the beginning of a stop string."""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[Logprobs] | None = None
    """One for each of the token ids, where they were asked for."""
    prompt_logprobs: Sequence[Logprobs] | None = None
    """Of the next so many tokens of the prompt; its first token has none."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    finished: bool = False
    """Whether the whole request is now finished."""
    metrics: RequestMetrics | None = None
    """Of a finished request."""


@dataclass(slots=True)
class _Continuation:
    detokenizer: IncrementalDetokenizer | None
    stop: StopChecker
    num_tokens: int = 0
    has_ended: bool = False
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class _Tracked:
    continuations: list[_Continuation]
    min_tokens: int
    shows_stop: bool
    """Whether what ends a text is part of it."""


class OutputProcessor:
    """Makes of what an engine emits what its users are told. Without a tokenizer texts stay empty.

    One thread may call `process` while another calls `add` and `discard`.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._tracked: dict[str, _Tracked] = {}

    def add(self, request: EngineRequest, shown_ids: Collection[int] = ()) -> None:
        """`shown_ids`: special tokens that are part of its text."""
        params = request.params
        continuations = [
            _Continuation(self._detokenizer(request.prompt_ids, shown_ids), StopChecker(params.stop))
            for _ in range(params.n)
        ]
        self._tracked[request.request_id] = _Tracked(
            continuations, params.min_tokens, params.include_stop_str_in_output
        )

    def _detokenizer(
        self, prompt_ids: list[int], shown_ids: Collection[int]
    ) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        detokenizer = self._tokenizer.detokenizer(shown_ids=shown_ids)
        for token_id in prompt_ids[-PROMPT_TAIL:]:  # a prompt of ids may end inside a character
            detokenizer.push(token_id)
        return detokenizer

    def discard(self, request_id: str) -> None:
        """Forget a request; what the engine still says about it is ignored."""
        self._tracked.pop(request_id, None)

    def process(self, outputs: Iterable[SequenceOutput]) -> tuple[list[Delta], list[tuple[str, int]]]:
        """Returns what was added, and the continuations (request id, index) that a stop string ended and that
        the engine must abort. A request that has finished is forgotten."""
        deltas: list[Delta] = []
        aborts: list[tuple[str, int]] = []
        for output in outputs:
            tracked = self._tracked.get(output.request_id)
            if tracked is None:
                continue
            continuation = tracked.continuations[output.index]
            if output.metrics is not None:
                continuation.metrics = output.metrics
            parts = [each.metrics for each in tracked.continuations if each.metrics is not None]
            finished = len(parts) == len(tracked.continuations)
            prompt_logprobs = self._all_logprobs(output.prompt_logprobs)
            if not continuation.has_ended:
                delta = self._advance(tracked, continuation, output)
                if delta.finish_reason is not None and output.finish_reason is None:
                    aborts.append((output.request_id, output.index))
            elif finished or prompt_logprobs:
                delta = Delta(output.request_id, output.index)
            else:
                continue
            if finished:
                self.discard(output.request_id)
                delta = replace(delta, finished=True, metrics=_merge_metrics(parts))
            deltas.append(replace(delta, prompt_logprobs=prompt_logprobs) if prompt_logprobs else delta)
        return deltas, aborts

    def _advance(self, tracked: _Tracked, continuation: _Continuation, output: SequenceOutput) -> Delta:
        """Take one continuation's new tokens, up to the one that completes a stop string."""
        stop, detokenizer = continuation.stop, continuation.detokenizer
        text, num_taken = "", len(output.token_ids)
        finish_reason: str | None = output.finish_reason
        stop_reason = output.stop_reason
        for position, token_id in enumerate(output.token_ids):
            continuation.num_tokens += 1
            # the token that ends a sequence is part of its ids, not of its text
            ends = output.finish_reason is FinishReason.STOP and position == len(output.token_ids) - 1
            is_text = not ends or output.ends_in_text or tracked.shows_stop
            if detokenizer is None or not is_text:
                continue
            may_stop = continuation.num_tokens >= tracked.min_tokens
            shown, matched = stop.push(detokenizer.push(token_id), may_stop=may_stop)
            text += shown
            if matched is not None:
                text += matched if tracked.shows_stop else ""
                finish_reason, stop_reason, num_taken = FinishReason.STOP, matched, position + 1
                break
        else:
            if output.finish_reason is not None and detokenizer is not None:
                shown, matched = stop.push(detokenizer.flush(), may_stop=True)
                text += shown + (stop.flush() if matched is None else matched if tracked.shows_stop else "")
        continuation.has_ended = finish_reason is not None
        return Delta(
            output.request_id,
            output.index,
            text,
            output.token_ids[:num_taken],
            logprobs=self._all_logprobs(output.logprobs and output.logprobs[:num_taken]),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _all_logprobs(self, scored: list[TokenLogprobs] | None) -> list[Logprobs] | None:
        return None if scored is None else [self._logprobs(position) for position in scored]

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
