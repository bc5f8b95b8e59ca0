"""Requests from a file, a JSON object a line.

Knows the format, and says of a mistake in which line it is.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridserve.bench.workloads import Conversation, Turn, Workload
from hybridserve.config.spelling import nearest
from hybridserve.core.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEFAULT_MAX_TOKENS = 128
CONCURRENCY = 8
_PROMPTS = ("prompt", "messages", "turns")
_OWN = ("max_tokens", "ignore_eos")
_SAMPLING = [
    f.name for f in fields(SamplingParams) if f.name not in (*_OWN, "n", "logprobs", "prompt_logprobs")
]
_KEYS = [*_PROMPTS, *_OWN, "adapter", *_SAMPLING]


def read_workload(path: Path, *, temperature: float | None = None) -> Workload:
    """`prompt`: text or token ids; or `messages`: a list of them; or `turns`: what a user says one after the
    other, each after the answer to the one before. Also `max_tokens`, `adapter`, `ignore_eos` and sampling
    parameters. The lines are sent in order, and again from the first where more are asked for.

    `temperature` is for the lines that have none. Raises ValueError, OSError.
    """
    conversations = list(_lines(path, 0.0 if temperature is None else temperature))
    if not conversations:
        raise ValueError(f"{path}: holds no requests")
    num_requests = sum(len(each.turns) for each in conversations)
    return Workload(
        path.name, partial(itertools.cycle, conversations), num_requests, min(CONCURRENCY, num_requests)
    )


def _lines(path: Path, temperature: float) -> Iterator[Conversation]:
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                yield _conversation(json.loads(text), temperature)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: {error}") from None


def _conversation(line: Any, temperature: float) -> Conversation:
    if not isinstance(line, dict) or sum(name in line for name in _PROMPTS) != 1:
        raise ValueError(f"a line is an object with one of {', '.join(_PROMPTS)}")
    for name in line:
        if name not in _KEYS:
            near = nearest(name, _KEYS)
            raise ValueError(
                f"{name!r}: unknown; " + (f"did you mean {near}?" if near else f"there is {', '.join(_KEYS)}")
            )
    sampling = {"temperature": temperature, **{name: line[name] for name in _SAMPLING if name in line}}
    max_tokens = line.get("max_tokens", DEFAULT_MAX_TOKENS)
    ignore_eos = line.get("ignore_eos", False)
    if isinstance(bias := sampling.get("logit_bias"), dict):  # JSON has no other keys than text
        sampling["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
    SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling)  # or it says what is wrong
    adapter = line.get("adapter")
    if not isinstance(adapter, str | None):
        raise ValueError(f"adapter: {adapter!r} is not a name")
    contents = _contents(line)
    turns = tuple(Turn(content, max_tokens) for content in contents)
    return Conversation(turns, adapter, ignore_eos, sampling)


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise ValueError(f"logit_bias: {key!r} is no token id") from None


def _contents(line: dict[str, Any]) -> list[Any]:
    if "prompt" in line:
        prompt = line["prompt"]
        is_ids = isinstance(prompt, list) and all(type(each) is int and each >= 0 for each in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise ValueError("prompt: is neither text nor a list of token ids, or empty")
        return [prompt]
    if "messages" in line:
        messages = line["messages"]
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise ValueError('messages: is no list of {"role", "content"}')
        return [messages]
    turns = line["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(each, str) and each for each in turns):
        raise ValueError("turns: is no list of texts")
    return [[{"role": "user", "content": text}] for text in turns]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
