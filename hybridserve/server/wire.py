"""Responses as they go over the wire. Shapes only; `completions` and `chat` fill them.

A field with the value UNSET is left out.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: of the prompt, those that had been computed before."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the engine counts them; those after a stop string are not counted. `prompt_tokens_details`
    are there once they are known: at the end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, num_prompt: int, num_generated: int, num_cached: int | None) -> Usage:
        details = UNSET if num_cached is None else PromptTokensDetails(num_cached)
        return cls(num_prompt, num_generated, num_prompt + num_generated, details)


class TokenInfo(msgspec.Struct, frozen=True):
    """A token of the prompt, or one that might have stood in its place."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, TokenInfo] | None]
"""For each token of the prompt but the first: token id -> what is known of it."""


# ---- /v1/completions


class CompletionLogprobs(msgspec.Struct):
    """One entry a token; with `echo` those of the prompt are first, the first of which has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """A whole answer, or (streamed) a piece of it; `usage` is null in a piece where it comes with another."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


# ---- /v1/chat/completions


class TopLogprob(msgspec.Struct):
    """`bytes` are those that the token adds to the text: perhaps a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class FunctionCall(msgspec.Struct):
    """`arguments` is JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """`content` is null where there is nothing but calls."""

    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """The first of a call has its id, type and name; the others add to its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# ---- the others


class ModelCard(msgspec.Struct):
    """The base model, or an adapter, whose `parent` is the base model. `root`: where it was loaded from."""

    id: str
    created: int
    root: str
    parent: str | None
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: Literal["hybridserve"] = "hybridserve"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Text(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct):
    """What a client needs to write prompts for `/v1/completions` itself."""

    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    add_bos_token: bool
    """Whether a prompt of text gets the beginning-of-sequence token."""
    tokenizer_class: str = "PreTrainedTokenizerFast"


class Version(msgspec.Struct):
    version: str


class Health(msgspec.Struct):
    """`status`: ok, starting, draining or dead."""

    status: str


class LoadedAdapter(msgspec.Struct):
    """`identity` is a hash of the content: an equal one means that nothing changed."""

    lora_name: str
    identity: str
    rank: int
    num_bytes: int
    num_modules: int
    status: Literal["loaded"] = "loaded"


class UnloadedAdapter(msgspec.Struct):
    """Where requests still use it, it goes with the last of them."""

    lora_name: str
    still_in_use: bool
    status: Literal["unloaded"] = "unloaded"
