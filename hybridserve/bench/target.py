"""What is measured or talked to: something that answers a prompt piece by piece.

Knows the shape of a request and of what comes back; does not know where a target runs, nor any time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, TypeGuard, cast

Message = Mapping[str, Any]
"""{"role", "content"}."""
Content = str | list[int] | list[Message]
"""Text, token ids or messages."""


class TargetError(ValueError):
    """A target that can't be used at all, and why: a user's mistake, in one line."""


class RequestFailed(Exception):
    """A request that got no whole answer. `kind` is one of few words, `detail` says more."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True)
class TargetRequest:
    """max_tokens None: as many as the target likes. sampling: OpenAI's names, such as temperature."""

    prompt: Content
    max_tokens: int | None = None
    adapter: str | None = None
    ignore_eos: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)


def is_chat(prompt: Content) -> TypeGuard[list[Message]]:
    """Whether it is messages, not text or token ids."""
    return not isinstance(prompt, str) and bool(prompt) and not isinstance(prompt[0], int)


def joined(first: Content, second: Content) -> Content:
    """One prompt out of two of the same form."""
    return cast("Any", first) + second  # type: ignore[no-any-return]


class Usage(NamedTuple):
    """Tokens of a whole request, as the target counts them. Cached ones are None where it doesn't tell."""

    num_prompt: int
    num_output: int
    num_cached: int | None = None


@dataclass(slots=True)
class Arrival:
    """All that came at one moment: what one step of an engine brought, or one read from a connection."""

    text: str = ""
    num_events: int = 0
    """Pieces that it came in, each of at least one token or some text."""
    num_tokens: int | None = 0
    """None where the target doesn't tell."""
    token_ids: list[int] = field(default_factory=list)
    """Where the target tells them."""
    usage: Usage | None = None
    """With the last arrival."""
    finish_reason: str | None = None


class Target(Protocol):
    """An asynchronous context manager: entering starts it or reaches it, TargetError where that fails."""

    @property
    def name(self) -> str:
        """The model."""

    @property
    def vocab_size(self) -> int | None:
        """None: unknown."""

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and answer together; None: unknown."""

    @property
    def counts(self) -> str:
        """Where the numbers of tokens in a single arrival come from, in words."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def adapters(self) -> list[str]:
        """Names that `TargetRequest.adapter` may have."""

    async def rehearse(self, request: TargetRequest, *, needs_ids: bool) -> None:
        """Serve a request, to find out what the target can do; `needs_ids`: arrivals must have token ids.
        TargetError where it can't serve such requests."""

    def stream(self, request: TargetRequest) -> AsyncGenerator[Arrival]:
        """Closing it ends the request. Raises RequestFailed."""

    def describe(self) -> dict[str, Any]:
        """What a report says of it, as JSON."""
