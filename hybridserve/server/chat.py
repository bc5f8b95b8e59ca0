"""POST /v1/chat/completions: from its body to a `Generation`, and the shape of the answer."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from msgspec import UNSET

from hybridserve.core.request import FinishReason
from hybridserve.server import tokens
from hybridserve.server.generation import Generation, Job, num_cached
from hybridserve.server.prompting import budget, checked, cut, encode_chat
from hybridserve.server.tenants import cache_salt
from hybridserve.server.tool_parser import ArgumentsGrown, CallBegun, Said, ToolCallParser, assembled
from hybridserve.server.tools import constrained, marker_ids
from hybridserve.server.wire import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import msgspec

    from hybridserve.outputs import CompletionOutput, Delta, Logprobs, RequestOutput
    from hybridserve.server.exchange import Exchange
    from hybridserve.server.protocol import ChatRequest
    from hybridserve.server.service import Service
    from hybridserve.server.tools import ToolUse
    from hybridserve.text import Tokenizer


async def prepare(service: Service, body: ChatRequest, exchange: Exchange) -> Generation:
    """What a request asks for. Raises ApiError for what can't be asked."""
    body.check(service.config.limits)
    service.check_priority(body.priority)
    adapter = service.adapter_of(body.model)
    tokenizer, use = service.engine.tokenizer, body.tool_use
    prompt_ids = await encode_chat(
        service,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        tools=use.for_template() if use else (),
    )
    prompt_ids = cut(prompt_ids, body.truncate_prompt_tokens)
    max_tokens = budget(service, "messages", len(prompt_ids), body.asked_tokens, None, body.asked_name)
    params = await checked(service, body, body.params(max_tokens))
    if use is not None:
        params = await constrained(service, use, params)
    job = Job(prompt_ids, None, params, marker_ids(tokenizer) if use else frozenset())
    answer = ChatAnswer(body, job, body.model or service.name, tokenizer, use)
    salt = cache_salt(exchange.tenant, body.cache_salt)
    return Generation([job], adapter, body.priority, salt, answer, body.stream)


class ChatAnswer:
    """In a stream, the first pieces say who speaks, for all choices in order of index, whichever of them has
    something to say first: OpenAI's client makes its list of choices by them."""

    def __init__(
        self, body: ChatRequest, job: Job, model: str, tokenizer: Tokenizer | None, use: ToolUse | None
    ) -> None:
        self._body = body
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        self._use = use
        self._speakers: dict[int, _Speaker] = {}
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._has_begun = False
        self._needs_tokens = body.logprobs or body.return_token_ids or body.continuous_usage

    def whole(self, jobs: Sequence[Job], outputs: Sequence[RequestOutput]) -> ChatCompletion:
        output = outputs[0]
        choices = []
        for part in output.outputs:
            message, finish_reason = self._message(part)
            choice = ChatChoice(
                part.index,
                message,
                self._logprobs(part.token_ids, part.logprobs),
                finish_reason,
                part.stop_reason,
                part.token_ids if self._body.return_token_ids else UNSET,
            )
            choices.append(choice)
        num_generated = sum(len(part.token_ids) for part in output.outputs)
        usage = Usage.of(len(self._job.prompt_ids), num_generated, num_cached(jobs))
        answer = ChatCompletion(self._id, self._created, self._model, choices, usage)
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = tokens.of_prompt(output.prompt_logprobs or [])
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._job.prompt_ids
        return answer

    def _message(self, part: CompletionOutput) -> tuple[ChatMessage, str | None]:
        """What a whole continuation says, and why it ended."""
        if self._use is None:
            return ChatMessage(part.text), part.finish_reason
        parser = ToolCallParser(self._use.names)
        events = parser.push(part.text) + parser.finish(is_cut=part.finish_reason == FinishReason.LENGTH)
        text, calls = assembled(events)
        message = ChatMessage(text or None if calls else text)
        if calls:
            message.tool_calls = [ToolCall(_new_id(), FunctionCall(*call)) for call in calls]
        return message, parser.finish_reason(part.finish_reason)

    def pieces(self, job_index: int, delta: Delta) -> Iterable[msgspec.Struct]:
        said, finish_reason = self._said(delta)
        if finish_reason is None and not said and not (self._needs_tokens and delta.token_ids):
            return
        if not self._has_begun:
            self._has_begun = True
            yield from self._speakers_named()
        choices = [ChatChunkChoice(delta.index, each, None, None) for each in said or [ChatDelta()]]
        choices[0].logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        if self._body.return_token_ids:
            choices[0].token_ids = list(delta.token_ids)
        choices[-1].finish_reason, choices[-1].stop_reason = finish_reason, delta.stop_reason
        for choice in choices:
            yield self._piece([choice])

    def _speakers_named(self) -> Iterable[ChatChunk]:
        for index in range(self._job.params.n):
            piece = self._piece([ChatChunkChoice(index, ChatDelta("assistant", ""), None, None)])
            if self._body.return_token_ids and not index:
                piece.prompt_token_ids = self._job.prompt_ids
            yield piece

    def _said(self, delta: Delta) -> tuple[list[ChatDelta], str | None]:
        """What a step adds, no more than one thing in each, and why the continuation ended, if it did."""
        if self._use is None:
            return [ChatDelta(content=delta.text)] if delta.text else [], delta.finish_reason
        if delta.index not in self._speakers:
            self._speakers[delta.index] = _Speaker(self._use.names)
        return self._speakers[delta.index].add(delta.text, delta.finish_reason)

    def last_piece(self) -> ChatChunk | None:
        return self._chunk([], self._usage()) if self._body.includes_usage else None

    def _piece(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        if self._body.continuous_usage:
            return self._chunk(choices, self._usage())
        return self._chunk(choices, None if self._body.includes_usage else UNSET)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | msgspec.UnsetType | None) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, choices, usage)

    def _usage(self) -> Usage:
        return Usage.of(len(self._job.prompt_ids), self._job.num_generated, num_cached([self._job]))

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None) -> ChatLogprobs | None:
        count = self._body.num_logprobs
        if count is None or logprobs is None:
            return None
        return tokens.of_chat(self._tokenizer, token_ids, logprobs, count)


class _Speaker:
    """One continuation of a stream whose model may call tools."""

    def __init__(self, names: Collection[str]) -> None:
        self._parser = ToolCallParser(names)
        self._num_calls = 0

    def add(self, text: str, finish_reason: str | None) -> tuple[list[ChatDelta], str | None]:
        """What a step adds, and why the continuation ended, if it did."""
        events = self._parser.push(text)
        if finish_reason is not None:
            events += self._parser.finish(is_cut=finish_reason == FinishReason.LENGTH)
        said: list[ChatDelta] = []
        for event in events:
            match event:
                case Said(more):
                    said.append(ChatDelta(content=more))
                case CallBegun(name):
                    function = FunctionDelta("", name)
                    call = ToolCallDelta(self._num_calls, function, _new_id(), "function")
                    said.append(ChatDelta(tool_calls=[call]))
                    self._num_calls += 1
                case ArgumentsGrown(more):
                    call = ToolCallDelta(self._num_calls - 1, FunctionDelta(more))
                    said.append(ChatDelta(tool_calls=[call]))
        return said, self._parser.finish_reason(finish_reason)


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"
