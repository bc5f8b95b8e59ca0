"""What a request may ask for, and when it has had it. Knows lengths, the arena's size and tokens that end a
sequence; does not know who else is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hybridserve.core.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.core.request import Request, SamplingParams


def check_length(num_prompt: int, params: SamplingParams, max_model_len: int) -> None:
    """Raise ValueError for a prompt of so many tokens that no sequence could begin with."""
    if not num_prompt:
        raise ValueError("prompt: is empty")
    if num_prompt > max_model_len:
        raise ValueError(f"prompt: {num_prompt} tokens, max_model_len is {max_model_len}")
    if num_prompt == max_model_len and params.max_tokens:
        raise ValueError(f"prompt: {num_prompt} tokens leave no room to generate; that is max_model_len")


def check_vocabulary(prompt_ids: Iterable[int], params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError, naming the field, for a token id that the model doesn't have."""
    for name, token_ids in (
        ("prompt", prompt_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", params.logit_bias),
    ):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{name}: token id {token_id} is not in the vocabulary (0 to {vocab_size - 1})"
                )


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one engine. Raises ValueError for one below 1."""

    layout: CacheLayout
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: Literal["fcfs", "priority"]
    eos_token_ids: frozenset[int] = frozenset()
    max_running_per_adapter: int | None = None

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len) < 1:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}), max_num_batched_tokens ({self.max_num_batched_tokens}) "
                f"and max_model_len ({self.max_model_len}) must be at least 1"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy: {self.policy!r} is neither 'fcfs' nor 'priority'")
        if self.max_running_per_adapter is not None and self.max_running_per_adapter < 1:
            raise ValueError(f"max_running_per_adapter: {self.max_running_per_adapter} is not at least 1")

    def max_computed(self, request: Request) -> int:
        """Tokens of a request that will be computed at most: the last one drawn never is."""
        longest = min(request.num_prompt + request.params.max_tokens, self.max_model_len)
        return max(request.num_prompt, longest - 1)

    def check(self, request: Request) -> None:
        """Raise ValueError, naming the field, for a request that could never run, alone as it might be."""
        layout, params, num_prompt = self.layout, request.params, request.num_prompt
        if "#" in request.id:
            raise ValueError(f"request_id: {request.id!r} has a '#', which names the continuations of n > 1")
        if request.priority and self.policy == "fcfs":
            raise ValueError(f"priority: {request.priority} has no effect, scheduler.policy is 'fcfs'")
        check_length(num_prompt, params, self.max_model_len)
        num_cached = self.max_computed(request)
        if layout.slabs_for(num_cached) > layout.num_usable_slabs:
            field_name = "max_tokens" if layout.slabs_for(num_prompt) <= layout.num_usable_slabs else "prompt"
            raise ValueError(
                f"{field_name}: {num_prompt} tokens of prompt and up to {params.max_tokens} generated need "
                f"{num_cached} in the cache; it holds {layout.max_tokens_one_sequence() or 0} of one sequence"
            )

    def finish_reason(self, request: Request, token: int, is_complete: bool) -> FinishReason | None:
        """Whether the token that a request has just drawn ends it; sets `stop_reason`. `is_complete`: nothing
        may follow it."""
        params, num_output = request.params, len(request.output_ids)
        if num_output > params.min_tokens:
            if token in params.stop_token_ids:
                request.stop_reason = token
                return FinishReason.STOP
            if token in self.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
        if is_complete:
            return FinishReason.STOP
        num_known = len(request.prompt_ids) + num_output
        return FinishReason.LENGTH if num_known > request.max_computed else None
