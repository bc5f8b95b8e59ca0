"""Prompts as token ids, and how long what follows them may be. Knows limits; knows no answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from hybridserve.server.errors import bad_request, from_value_error
from hybridserve.server.protocol import too_long

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.core.request import SamplingParams
    from hybridserve.server.protocol import ChatRequest, CompletionRequest, Message, Prompt
    from hybridserve.server.service import Service
    from hybridserve.text import Tools


FEW_IDS = 10_000
FEW_MESSAGES = 64
"""So many are checked in less time than it takes to hand them to a worker thread."""


async def encode_prompts(
    service: Service, prompts: Sequence[Prompt], *, add_special_tokens: bool, keep: int | None
) -> list[tuple[str, list[int]]]:
    """(what the field is called, token ids) of each; with `keep`, so many of the ids, the last ones."""

    async def encode(index: int, prompt: Prompt) -> tuple[str, list[int]]:
        name = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str):
            ids = await encode_text(service, name, prompt, add_special_tokens)
        else:
            ids = prompt
            if len(ids) <= FEW_IDS:
                check_ids(service, name, ids)
            else:
                await service.engine.in_worker(check_ids, service, name, ids)
        return name, cut(ids, keep)

    tasks = [encode(index, prompt) for index, prompt in enumerate(prompts)]
    if len(tasks) == 1:
        return [await tasks[0]]
    return await asyncio.gather(*tasks)


async def encode_text(service: Service, name: str, text: str, add_special_tokens: bool) -> list[int]:
    if not text:
        return []  # though the tokenizer would put special tokens around it
    check_size(service, name, text)
    try:
        return await service.engine.encode(text, add_special_tokens=add_special_tokens)
    except ValueError as error:
        raise from_value_error(error, {"prompt": name}) from None


def check_size(service: Service, name: str, text: str) -> None:
    """Refuses a text that is too long whatever it says, before anybody makes tokens of it."""
    if service.max_prompt_chars is not None and len(text) > service.max_prompt_chars:
        raise bad_request(
            name,
            f"{len(text)} characters can't fit into {service.engine.max_model_len} tokens (max_model_len)",
            "context_length_exceeded",
        )


def check_ids(service: Service, name: str, ids: Sequence[int]) -> None:
    vocab_size = service.engine.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise bad_request(name, f"a token id is not in the vocabulary (0 to {vocab_size - 1})")


async def checked(
    service: Service, body: ChatRequest | CompletionRequest, params: SamplingParams
) -> SamplingParams:
    """The parameters, whose structured outputs, if any, can be enforced."""
    try:
        return await service.engine.checked(params)
    except ValueError as error:
        raise body.structured_error(error) from None


def cut(ids: list[int], keep: int | None) -> list[int]:
    return ids if keep is None else ids[-keep:]


def budget(
    service: Service,
    name: str,
    num_prompt: int,
    asked: int | None,
    default: int | None,
    asked_name: str = "max_tokens",
) -> int:
    """Tokens to generate at most: those that were asked for, which must fit; else `default`, or what does.
    `name` and `asked_name` are the fields of the prompt and of what was asked for."""
    longest = service.engine.max_model_len
    if num_prompt == 0:
        raise bad_request(name, "is empty")
    if num_prompt > longest or (num_prompt == longest and asked != 0):
        raise too_long(name, num_prompt, longest, asked or 1)
    if asked is None:
        return longest - num_prompt if default is None else min(default, longest - num_prompt)
    if num_prompt + asked > longest:
        raise too_long(asked_name, num_prompt, longest, asked)
    return asked


def _for_template(service: Service, messages: Sequence[Message]) -> list[dict[str, Any]]:
    for index, message in enumerate(messages):
        check_size(service, f"messages[{index}].content", message.content or "")
        for number, call in enumerate(message.tool_calls or ()):
            if isinstance(arguments := call.function.arguments, str):
                name = f"messages[{index}].tool_calls[{number}].function.arguments"
                check_size(service, name, arguments)
    return [message.for_template() for message in messages]


async def encode_chat(
    service: Service, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Tools = ()
) -> list[int]:
    if len(messages) <= FEW_MESSAGES and not any(message.tool_calls for message in messages):
        shown = _for_template(service, messages)
    else:  # calls' arguments are JSON
        shown = await service.engine.in_worker(_for_template, service, messages)
    try:
        return await service.engine.encode_chat(
            shown, add_generation_prompt=add_generation_prompt, tools=tools
        )
    except ValueError as error:
        raise from_value_error(error) from None
