"""Log-probabilities and token ids in the shapes of the two APIs.

Knows a tokenizer's pieces; knows no requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.server.wire import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    TokenInfo,
    TokenLogprob,
    TopLogprob,
)
from hybridserve.text import IncrementalDetokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hybridserve.outputs import Logprob, Logprobs
    from hybridserve.text import Tokenizer

LEAST_LOGPROB = -9999.0
"""For a probability of zero: JSON has no infinity."""


def name_of(token_id: int, decoded: str | None) -> str:
    """A token's text; special tokens by name. Without a tokenizer, its id."""
    return f"token_id:{token_id}" if decoded is None else decoded


def number(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST_LOGPROB)


def of_prompt(logprobs: Sequence[Logprobs | None]) -> PromptLogprobs:
    return [None if position is None else _by_id(position) for position in logprobs]


def _by_id(position: Logprobs) -> dict[str, TokenInfo]:
    return {str(i): TokenInfo(number(each), each.rank, each.decoded_token) for i, each in position.items()}


class CompletionScorer:
    """`logprobs` of one continuation for /v1/completions, piece after piece.

    An offset is where in the text a token begins: a token that is no part of it (a special one), or that is
    only a part of a character, has the offset of what comes next.
    """

    def __init__(self, tokenizer: Tokenizer | None, echoed: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = (
            None if tokenizer is None else IncrementalDetokenizer(tokenizer, starts_text=echoed)
        )
        self._offset = 0

    def skip(self, prompt_ids: Iterable[int]) -> None:
        """The last tokens of a prompt that is no part of the text: it may end inside a character."""
        if self._detokenizer is not None:
            for token_id in prompt_ids:
                self._detokenizer.push(token_id)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> CompletionLogprobs:
        scored = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, logprobs, strict=True):
            scored.text_offset.append(self._offset)
            if self._detokenizer is not None:
                self._offset += len(self._detokenizer.push(token_id))
            if position is None:  # the first token of a prompt
                decoded = None if self._tokenizer is None else self._tokenizer.decode_token(token_id)
                scored.tokens.append(name_of(token_id, decoded))
                scored.token_logprobs.append(None)
                scored.top_logprobs.append(None)
                continue
            own = position[token_id]
            scored.tokens.append(name_of(token_id, own.decoded_token))
            scored.token_logprobs.append(number(own))
            top: dict[str, float] = {}
            for other_id, other in position.items():  # of two with the same text, the likelier
                name = name_of(other_id, other.decoded_token)
                top[name] = max(number(other), top.get(name, LEAST_LOGPROB))
            scored.top_logprobs.append(top)
        return scored


def of_chat(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], logprobs: Sequence[Logprobs], count: int
) -> ChatLogprobs:
    """`count`: how many most likely tokens are shown; the one that was drawn need not be among them."""
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        own = position[token_id]
        ranked = sorted(position.items(), key=lambda item: item[1].rank)
        content.append(
            TokenLogprob(
                token=name_of(token_id, own.decoded_token),
                logprob=number(own),
                bytes=_bytes(tokenizer, token_id),
                top_logprobs=[
                    TopLogprob(name_of(i, each.decoded_token), number(each), _bytes(tokenizer, i))
                    for i, each in ranked[:count]
                ],
            )
        )
    return ChatLogprobs(content)


def _bytes(tokenizer: Tokenizer | None, token_id: int) -> list[int] | None:
    return None if tokenizer is None else list(tokenizer.piece(token_id))
