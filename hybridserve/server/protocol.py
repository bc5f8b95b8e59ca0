"""Requests as clients write them, checked to the letter, and what they mean to an engine.

Types are strict: true is no number and "7" is none. Null means that a field was not given. Ranges of sampling
parameters are those of `SamplingParams`, which has the last word. Knows no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from hybridserve.core.request import SamplingParams
from hybridserve.server.errors import ApiError, bad_request, from_value_error
from hybridserve.server.structured import ResponseFormat, Structured
from hybridserve.server.tenants import MAX_ASKED
from hybridserve.server.tools import CalledTool, ToolChoice, Tools, ToolUse, check_tools, read_choice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridserve.config.schema import LimitsConfig
    from hybridserve.core.structured_outputs import StructuredOutputs

MAX_TOKEN_IDS = 1024
"""Of stop_token_ids and of logit_bias: each is looked at for every token."""
MAX_ALLOWED_IDS = 2**18
MAX_COUNT = 2**31 - 1

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
IdAsKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
"""A token id as JSON's keys are: text. Each id is written in one way, so that none is there twice."""
Number = Annotated[float, Field(allow_inf_nan=False)]
ModelName = Annotated[
    str, Field(description="the served model's name, or an adapter's; if null, the model's")
]

_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ]
}
PromptValue = Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
"""Text, token ids, or a list of either: `read_prompts` checks it, and makes nothing else of it first."""

Prompt = str | list[int]


def _strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text_of_parts(value: Any) -> Any:
    """The content of a message as one text: clients may send it in parts."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError("a part of another type than text is not supported")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of type text has no text")
        texts.append(part["text"])
    return "\n".join(texts)


_STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}},
    ]
}
_PART_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}, {"type": "null"}]
}
Strings = Annotated[list[str], BeforeValidator(_strings), WithJsonSchema(_STOP_SCHEMA)]
Content = Annotated[str | None, BeforeValidator(_text_of_parts), WithJsonSchema(_CONTENT_SCHEMA)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class StreamOptions(_Body):
    """`include_usage`: one more piece at the end, with no choices, says how many tokens there were.
    `continuous_usage_stats`: every piece says how many there are until then. `include_obfuscation` has no
    effect: pieces are never padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class _Sampling(_Body):
    """What both ways to generate have."""

    model: ModelName | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Count = 0
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] = 0
    min_p: Number = 0.0
    n: Positive = 1
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    repetition_penalty: Number = 1.0
    logit_bias: Annotated[dict[IdAsKey, Number], Field(max_length=MAX_TOKEN_IDS)] = Field(
        default_factory=dict
    )
    stop: Strings = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MAX_ALLOWED_IDS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Count | None = None
    return_token_ids: bool = False
    truncate_prompt_tokens: Positive | None = Field(
        default=None, description="keep so many tokens of the prompt, the last ones"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_ASKED)] | None = Field(
        default=None,
        description="only prompts with the same salt, of the same key, share what has been computed of them",
    )
    priority: Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)] = Field(
        default=0, description="lower runs sooner; where scheduler.policy is priority"
    )

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def without_effect(self) -> list[str]:
        """Fields that are accepted, but that nothing here depends on."""
        options = self.stream_options
        return (
            ["stream_options.include_obfuscation"]
            if options and options.include_obfuscation is not None
            else []
        )

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def asked_name(self) -> str:
        """Which of the two names a client used."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def _structured(self) -> StructuredOutputs | None:
        wanted = self.structured_outputs or self.response_format
        try:
            return None if wanted is None else wanted.structured
        except ValueError as error:
            raise self.structured_error(error) from None

    def structured_error(self, error: ValueError) -> ApiError:
        """Of a ValueError about `SamplingParams.structured_outputs`, by the name that the client gave to
        it."""
        if self.structured_outputs is not None:
            return from_value_error(error)
        return bad_request("response_format", str(error).partition(": ")[2])

    def _check(self, limits: LimitsConfig) -> None:
        """What the configuration limits."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "is for a stream")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.asked_tokens:
            raise bad_request("max_tokens", "differs from max_completion_tokens, which means the same")
        if self.n > limits.n:
            raise bad_request("n", f"should be at most {limits.n} (server.limits.n)")
        if len(self.stop) > limits.stop:
            raise bad_request("stop", f"should have at most {limits.stop} strings (server.limits.stop)")
        if any(len(text.encode()) > limits.stop_bytes for text in self.stop):
            raise bad_request(
                "stop", f"a string should have at most {limits.stop_bytes} bytes (server.limits.stop_bytes)"
            )
        if None not in (self.structured_outputs, self.response_format):
            raise bad_request("response_format", "can't be used beside structured_outputs")
        spec = self._structured()
        if spec is not None and spec.num_bytes > limits.schema_bytes:
            message = f"should have at most {limits.schema_bytes} bytes (server.limits.schema_bytes)"
            raise self.structured_error(ValueError(f"structured_outputs.{spec.kind}: {message}"))
        check_logprobs("prompt_logprobs", self.prompt_logprobs, limits)
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request(
                "prompt_logprobs", "are not streamed (echo and logprobs of /v1/completions are)"
            )

    def _params(self, renamed: Mapping[str, str] | None = None, **values: Any) -> SamplingParams:
        try:
            return SamplingParams(
                min_tokens=self.min_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                seed=self.seed,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
                stop=tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids),
                include_stop_str_in_output=self.include_stop_str_in_output,
                ignore_eos=self.ignore_eos,
                structured_outputs=self._structured(),
                allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
                **values,
            )
        except ValueError as error:
            raise from_value_error(error, {"max_tokens": self.asked_name, **(renamed or {})}) from None


def check_logprobs(name: str, count: int | None, limits: LimitsConfig) -> None:
    if count is not None and count > limits.logprobs:
        raise bad_request(name, f"should be at most {limits.logprobs} (server.limits.logprobs)")


class CompletionRequest(_Sampling):
    """Continue a prompt, or several."""

    prompt: PromptValue
    logprobs: Count | None = None
    echo: bool = False
    best_of: Positive | None = None
    add_special_tokens: bool = Field(
        default=True, description="put the tokenizer's special tokens around a prompt of text"
    )

    @property
    def scores_prompt(self) -> int | None:
        """How many most likely tokens are computed at each position of the prompt, if any are: where nothing
        is generated, that is all that there is to compute."""
        asked = [
            self.logprobs if self.echo else None,
            self.prompt_logprobs,
            0 if self.asked_tokens == 0 else None,
        ]
        return max((count for count in asked if count is not None), default=None)

    def check(self, limits: LimitsConfig) -> None:
        self._check(limits)
        check_logprobs("logprobs", self.logprobs, limits)
        if self.best_of not in (None, self.n):
            raise bad_request("best_of", "should be n: nothing is drawn that is not returned")

    def params(self, max_tokens: int) -> SamplingParams:
        return self._params(
            max_tokens=max_tokens,
            n=1 if max_tokens == 0 else self.n,
            logprobs=self.logprobs,
            prompt_logprobs=self.scores_prompt,
        )


class Message(BaseModel):
    """Fields beyond these go to the chat template as they are."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is needed; only an assistant may say nothing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are for an assistant")
        return self

    def for_template(self) -> dict[str, Any]:
        message = {**(self.model_extra or {}), "role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatRequest(_Sampling):
    """Answer a conversation. Without max_tokens, it may go on for as long as the context allows."""

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: Count | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = Field(
        default=True, description="end the prompt where an assistant's answer begins"
    )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tool_use(self) -> ToolUse | None:
        choice = read_choice(self.tool_choice, self.tools)
        return ToolUse.of(self.tools, choice, self.parallel_tool_calls is not False)

    @property
    def without_effect(self) -> list[str]:
        use, ignored = self.tool_use, super().without_effect
        if self.parallel_tool_calls is not None and use is None:
            ignored.append("parallel_tool_calls")
        if not (use and use.must_call) and any(tool.function.strict for tool in self.tools):
            ignored.append("tools.strict")
        return ignored

    def check(self, limits: LimitsConfig) -> None:
        self._check(limits)
        check_tools(self.tools, limits)
        use, wanted = self.tool_use, self._structured()
        if use is not None and wanted is not None and (use.must_call or wanted.kind != "json"):
            name = "response_format" if self.structured_outputs is None else "structured_outputs"
            reason = (
                "tool_choice says that the answer is a call"
                if use.must_call
                else "only JSON can be asked for"
            )
            raise bad_request(name, f"can't be used beside these tools: {reason}")
        check_logprobs("top_logprobs", self.top_logprobs, limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs", "needs logprobs: true")

    def params(self, max_tokens: int) -> SamplingParams:
        return self._params(
            {"logprobs": "top_logprobs"},
            max_tokens=max_tokens,
            n=self.n,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class TokenizeRequest(_Body):
    """The token ids of a text or of a conversation: one of `prompt` and `messages`."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Tools = Field(default_factory=list)
    add_special_tokens: bool = Field(default=True, description="as for a prompt of /v1/completions")
    add_generation_prompt: bool = Field(default=True, description="as for /v1/chat/completions")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("one of prompt and messages is needed")
        if self.tools and self.messages is None:
            raise ValueError("tools are for messages")
        return self


class DetokenizeRequest(_Body):
    """The text of token ids, without special tokens."""

    model: ModelName | None = None
    tokens: list[TokenId]


class LoadAdapterRequest(_Body):
    """`lora_path`: a directory under one of lora.roots, absolute or relative to a root. A name that is known
    gets the new content."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]


class UnloadAdapterRequest(_Body):
    """Requests that run go on."""

    lora_name: Annotated[str, Field(min_length=1)]


def read_prompts(value: Any, max_prompts: int, max_model_len: int, is_cut: bool) -> list[Prompt]:
    """One prompt or several, as a list. `is_cut`: longer ones than `max_model_len` are fine."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise bad_request("prompt", "should be text, token ids, or a list of either")
    if not value:
        raise bad_request("prompt", "is empty")
    if isinstance(value[0], int):
        return [_token_ids("prompt", value, max_model_len, is_cut)]
    if len(value) > max_prompts:
        raise bad_request("prompt", f"should be at most {max_prompts} prompts")
    if all(isinstance(item, str) for item in value):
        return value
    if not all(isinstance(item, list) for item in value):
        raise bad_request("prompt", "should be text, token ids, or a list of either")
    return [_token_ids(f"prompt[{i}]", item, max_model_len, is_cut) for i, item in enumerate(value)]


def _token_ids(name: str, ids: list[Any], max_model_len: int, is_cut: bool) -> list[int]:
    if len(ids) > max_model_len and not is_cut:
        raise too_long(name, len(ids), max_model_len)
    if not all(type(token) is int for token in ids):
        raise bad_request(name, "should be token ids (whole numbers), or text")
    return ids


def too_long(name: str, num_tokens: int, max_model_len: int, num_generated: int = 0) -> Exception:
    """A prompt that doesn't fit, alone or with what is to be generated."""
    more = f" and {num_generated} to generate" if num_generated else ""
    return bad_request(
        name, f"{num_tokens} tokens{more}, max_model_len is {max_model_len}", "context_length_exceeded"
    )
