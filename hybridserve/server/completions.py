"""POST /v1/completions: from its body to a `Generation`, and the shape of the answer."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from msgspec import UNSET

from hybridserve.outputs import PROMPT_TAIL
from hybridserve.server import tokens
from hybridserve.server.generation import Generation, Job, num_cached
from hybridserve.server.prompting import budget, checked, encode_prompts
from hybridserve.server.protocol import CompletionRequest, read_prompts
from hybridserve.server.tenants import cache_salt
from hybridserve.server.wire import Completion, CompletionChoice, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import msgspec

    from hybridserve.outputs import Delta, Logprobs, RequestOutput
    from hybridserve.server.exchange import Exchange
    from hybridserve.server.service import Service
    from hybridserve.text import Tokenizer

DEFAULT_MAX_TOKENS = 16


async def prepare(service: Service, body: CompletionRequest, exchange: Exchange) -> Generation:
    """What a request asks for. Raises ApiError for what can't be asked."""
    engine = service.engine
    body.check(service.config.limits)
    service.check_priority(body.priority)
    adapter = service.adapter_of(body.model)
    max_prompts = service.capacity // body.n
    is_cut = body.truncate_prompt_tokens is not None
    prompts = read_prompts(body.prompt, max_prompts, engine.max_model_len, is_cut)
    encoded = await encode_prompts(
        service, prompts, add_special_tokens=body.add_special_tokens, keep=body.truncate_prompt_tokens
    )
    jobs = []
    for (name, prompt_ids), prompt in zip(encoded, prompts, strict=True):
        max_tokens = budget(
            service, name, len(prompt_ids), body.asked_tokens, DEFAULT_MAX_TOKENS, body.asked_name
        )
        text = prompt if isinstance(prompt, str) and len(prompts) and not is_cut else None
        params = await checked(service, body, body.params(max_tokens))
        jobs.append(Job(prompt_ids, text, params))
    answer = CompletionAnswer(body, jobs, body.model or service.name, engine.tokenizer)
    salt = cache_salt(exchange.tenant, body.cache_salt)
    return Generation(jobs, adapter, body.priority, salt, answer, body.stream)


class CompletionAnswer:
    """Choice `prompt x n + continuation`."""

    def __init__(
        self, body: CompletionRequest, jobs: Sequence[Job], model: str, tokenizer: Tokenizer | None
    ) -> None:
        self._body = body
        self._jobs = jobs
        self._model = model
        self._tokenizer = tokenizer
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._prompt_logprobs: list[list[Logprobs | None]] = [[None] for _ in jobs]
        self._begun: set[int] = set()
        self._scorers: dict[int, tokens.CompletionScorer] = {}
        self._num_prompt = sum(len(job.prompt_ids) for job in jobs)
        self._show_ids = body.return_token_ids
        self._needs_tokens = body.logprobs is not None or body.return_token_ids or body.continuous_usage

    # ---- whole

    def whole(self, jobs: Sequence[Job], outputs: Sequence[RequestOutput]) -> Completion:
        choices: list[CompletionChoice] = []
        num_generated = 0
        for job_index, (job, output) in enumerate(zip(jobs, outputs, strict=True)):
            prompt_logprobs = output.prompt_logprobs or [None] * len(job.prompt_ids)
            self._prompt_logprobs[job_index] = prompt_logprobs
            for index in range(self._body.n):
                part = output.outputs[index if index < len(output.outputs) else 0]
                number = job_index * self._body.n + index
                num_generated += len(part.token_ids)
                choice = self._choice(number, job_index, part.token_ids, part.logprobs, part.text)
                choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason
                if self._body.prompt_logprobs is not None:
                    choice.prompt_logprobs = tokens.of_prompt(prompt_logprobs)
                choices.append(choice)
        return self._completion(choices, Usage.of(self._num_prompt, num_generated, num_cached(jobs)))

    # ---- in pieces

    def pieces(self, job_index: int, delta: Delta) -> Iterable[msgspec.Struct]:
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[job_index] += delta.prompt_logprobs
        if delta.finish_reason is None and not delta.text and not (self._needs_tokens and delta.token_ids):
            return
        copies = self._body.n if self._jobs[job_index].params.n < self._body.n else 1  # of a prompt alone
        for copy in range(copies):
            number = job_index * self._body.n + delta.index + copy
            choice = self._choice(number, job_index, delta.token_ids, delta.logprobs, delta.text)
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            yield self._piece([choice])

    def last_piece(self) -> Completion | None:
        if not self._body.includes_usage:
            return None
        return self._completion([], self._usage())

    def _piece(self, choices: list[CompletionChoice]) -> Completion:
        if self._body.continuous_usage:
            return self._completion(choices, self._usage())
        return self._completion(choices, None if self._body.includes_usage else UNSET)

    def _usage(self) -> Usage:
        num_generated = sum(job.num_generated for job in self._jobs)
        return Usage.of(self._num_prompt, num_generated, num_cached(self._jobs))

    # ---- both

    def _choice(
        self,
        number: int,
        job_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[Logprobs] | None,
        text: str,
    ) -> CompletionChoice:
        """With what stands before the first piece of a continuation, if this is the first."""
        body, job = self._body, self._jobs[job_index]
        is_first = number not in self._begun
        self._begun.add(number)
        echoes = is_first and body.echo
        choice = CompletionChoice(number, text, None, None)
        if echoes:
            choice.text = self._prompt_text(job) + text
        if body.logprobs is not None:
            scored_ids = list(token_ids)
            scored: list[Logprobs | None] = list(logprobs or ())
            if echoes:
                scored_ids, scored = job.prompt_ids + scored_ids, self._prompt_logprobs[job_index] + scored
            choice.logprobs = self._scorer(number, job).add(scored_ids, scored)
        if self._show_ids:
            choice.token_ids = list(token_ids)
            if is_first:
                choice.prompt_token_ids = job.prompt_ids
        return choice

    def _scorer(self, number: int, job: Job) -> tokens.CompletionScorer:
        if number not in self._scorers:
            self._scorers[number] = tokens.CompletionScorer(self._tokenizer, self._body.echo)
            if not self._body.echo:
                self._scorers[number].skip(job.prompt_ids[-PROMPT_TAIL:])
        return self._scorers[number]

    def _prompt_text(self, job: Job) -> str:
        if job.text is not None:
            return job.text
        return "" if self._tokenizer is None else self._tokenizer.decode(job.prompt_ids)

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> Completion:
        return Completion(self._id, self._created, self._model, choices, usage)
