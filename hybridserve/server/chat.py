"""POST /v1/chat/completions: from its body to a `Generation`, and the shape of the answer."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from msgspec import UNSET

from hybridserve.server import tokens
from hybridserve.server.generation import Generation, Job
from hybridserve.server.prompting import budget, checked, cut, encode_chat
from hybridserve.server.wire import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import msgspec

    from hybridserve.outputs import Delta, Logprobs, RequestOutput
    from hybridserve.server.protocol import ChatRequest
    from hybridserve.server.service import Service
    from hybridserve.text import Tokenizer


async def prepare(service: Service, body: ChatRequest, headers: list[tuple[bytes, bytes]]) -> Generation:
    """What a request asks for. Raises ApiError for what can't be asked."""
    body.check(service.config.limits)
    service.check_priority(body.priority)
    adapter = service.adapter_of(body.model)
    prompt_ids = await encode_chat(service, body.messages, add_generation_prompt=body.add_generation_prompt)
    prompt_ids = cut(prompt_ids, body.truncate_prompt_tokens)
    max_tokens = budget(service, "messages", len(prompt_ids), body.asked_tokens, None)
    job = Job(prompt_ids, None, await checked(service, body, body.params(max_tokens)))
    answer = ChatAnswer(body, job, body.model or service.name, service.engine.tokenizer)
    return Generation([job], adapter, body.priority, answer, body.stream, headers)


class ChatAnswer:
    """The first piece of each choice says who speaks."""

    def __init__(self, body: ChatRequest, job: Job, model: str, tokenizer: Tokenizer | None) -> None:
        self._body = body
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._needs_tokens = body.logprobs or body.return_token_ids or body.continuous_usage

    def whole(self, jobs: Sequence[Job], outputs: Sequence[RequestOutput]) -> ChatCompletion:
        output = outputs[0]
        choices = [
            ChatChoice(
                part.index,
                ChatMessage(part.text),
                self._logprobs(part.token_ids, part.logprobs),
                part.finish_reason,
                part.stop_reason,
                part.token_ids if self._body.return_token_ids else UNSET,
            )
            for part in output.outputs
        ]
        num_generated = sum(len(part.token_ids) for part in output.outputs)
        answer = ChatCompletion(
            self._id, self._created, self._model, choices, Usage.of(len(self._job.prompt_ids), num_generated)
        )
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = tokens.of_prompt(output.prompt_logprobs or [])
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._job.prompt_ids
        return answer

    def pieces(self, job_index: int, delta: Delta) -> Iterable[msgspec.Struct]:
        if delta.finish_reason is None and not delta.text and not (self._needs_tokens and delta.token_ids):
            return
        if delta.index not in self._begun:
            first = self._piece([ChatChunkChoice(delta.index, ChatDelta("assistant", ""), None, None)])
            if self._body.return_token_ids and not self._begun:
                first.prompt_token_ids = self._job.prompt_ids
            self._begun.add(delta.index)
            yield first
        said = ChatDelta(content=delta.text) if delta.text else ChatDelta()
        choice = ChatChunkChoice(
            delta.index,
            said,
            self._logprobs(delta.token_ids, delta.logprobs),
            delta.finish_reason,
            delta.stop_reason,
            list(delta.token_ids) if self._body.return_token_ids else UNSET,
        )
        yield self._piece([choice])

    def last_piece(self) -> ChatChunk | None:
        return self._chunk([], self._usage()) if self._body.includes_usage else None

    def _piece(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        if not self._body.includes_usage:
            return self._chunk(choices, UNSET)
        return self._chunk(choices, self._usage() if self._body.continuous_usage else None)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | msgspec.UnsetType | None) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, choices, usage)

    def _usage(self) -> Usage:
        return Usage.of(len(self._job.prompt_ids), self._job.num_generated)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None) -> ChatLogprobs | None:
        count = self._body.num_logprobs
        if count is None or logprobs is None:
            return None
        return tokens.of_chat(self._tokenizer, token_ids, logprobs, count)
