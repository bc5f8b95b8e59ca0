"""From what a caller of the Python APIs gives to what an engine takes: configuration, prompts, requests.

Knows the tokenizer of a model and the types that users pass; knows no engine and no torch. Every mistake is a
ValueError that begins with the name of the argument.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

from hybridserve.config.loader import load_config
from hybridserve.config.schema import EngineConfig
from hybridserve.core.request import MAX_COUNT, SamplingParams
from hybridserve.engine.messages import EngineRequest
from hybridserve.models.hub import resolve_model
from hybridserve.text import Tokenizer, TokenizerMissing

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.grammar.checker import GrammarChecker
    from hybridserve.text import Tools

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

MAX_SALT = 1024


def config_of(
    model: str | os.PathLike[str] | None,
    config: str | os.PathLike[str] | EngineConfig | None,
    options: Mapping[str, Any],
) -> EngineConfig:
    """The configuration that the arguments of `LLM` or `AsyncLLM` mean."""
    if not isinstance(model, str | os.PathLike | None):
        raise ValueError(f"model: {type(model).__name__} is neither a directory's name nor a hub id")
    if not isinstance(config, EngineConfig):
        name = None if model is None else str(model)
        return load_config(name, config, options, with_keys=False)
    if model is not None or options:
        raise ValueError("config: an EngineConfig says everything; give no model or options beside it")
    return config


class PromptReader:
    """Makes requests. Without a tokenizer, of prompts of token ids only."""

    def __init__(self, tokenizer: Tokenizer | None, tokenizer_error: str = "") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_error = tokenizer_error
        self._checker: GrammarChecker | None = None
        self._lock = threading.Lock()

    @classmethod
    def load(cls, config: EngineConfig, model_path: Path) -> PromptReader:
        """With the tokenizer that the configuration names or else the model has. ValueError for a damaged
        one, and where the one that is named isn't there."""
        try:
            return cls(Tokenizer.load(resolve_model(config.tokenizer) if config.tokenizer else model_path))
        except TokenizerMissing as error:
            if config.tokenizer:
                raise
            return cls(None, str(error))

    def text(self, field: str) -> Tokenizer:
        """The tokenizer, for an argument that needs it."""
        if self.tokenizer is None:
            raise ValueError(f"{field}: {self.tokenizer_error}; give prompts as token ids instead")
        return self.tokenizer

    def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
    ) -> list[int]:
        """The token ids of a conversation."""
        tokenizer = self.text("messages")
        return tokenizer.chat_ids(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def checked(self, params: SamplingParams) -> SamplingParams:
        """The parameters to use, with structured outputs that can be enforced: it may take seconds to find
        that out, once. ValueError, naming the field, if they can't."""
        spec = params.structured_outputs
        if spec is None:
            return params
        if self.tokenizer is None:
            reason = f"needs a tokenizer, and there is none ({self.tokenizer_error})"
            raise ValueError(f"structured_outputs: {reason}")
        with self._lock:
            if self._checker is None:
                from hybridserve.grammar.checker import GrammarChecker  # few need it

                self._checker = GrammarChecker(self.tokenizer.file)
        checked = self._checker.check(spec)
        return params if checked is spec else replace(params, structured_outputs=checked)

    def close(self) -> None:
        """End what runs beside it."""
        if self._checker is not None:
            self._checker.close()

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        adapter: str | None,
        priority: int,
        max_model_len: int,
        cache_salt: str | None = None,
    ) -> tuple[EngineRequest, str | None]:
        """The request, which came now, and its prompt's text if that was given as text."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params: {params!r} is not SamplingParams")
        if not isinstance(adapter, str | None):
            raise ValueError(f"adapter: {adapter!r} is not a name")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority: {priority!r} is not a whole number")
        if abs(priority) > MAX_COUNT:
            raise ValueError(f"priority: is out of range (from {-MAX_COUNT} to {MAX_COUNT})")
        if not isinstance(cache_salt, str | None) or len(cache_salt or "") > MAX_SALT:
            raise ValueError(f"cache_salt: is no text of at most {MAX_SALT} characters")
        if cache_salt and any("\ud800" <= character <= "\udfff" for character in cache_salt):
            raise ValueError("cache_salt: holds half of a surrogate pair, which is not text")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop: needs a tokenizer, and there is none ({self.tokenizer_error})")
        if isinstance(prompt, str):
            text, prompt_ids = prompt, self._encode(prompt, max_model_len)
        else:
            text, prompt_ids = None, _token_ids(prompt)
        request = EngineRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=self.checked(params),
            adapter=adapter,
            priority=priority,
            arrival=time.monotonic(),
            cache_salt=cache_salt,
        )
        return request, text

    def _encode(self, prompt: str, max_model_len: int) -> list[int]:
        tokenizer = self.text("prompt")
        if not prompt:  # stays empty, though the tokenizer would put special tokens around it
            return []
        # who asks for the bytes of an id for the first time waits for a look at the whole vocabulary
        if len(prompt) > max_model_len and tokenizer.max_bytes_an_id is not None:
            at_least = len(prompt) // tokenizer.max_bytes_an_id  # a character is a byte or more
            if at_least > max_model_len:  # not even worth the time of the tokenizer
                raise ValueError(f"prompt: {at_least} tokens or more, max_model_len is {max_model_len}")
        return tokenizer.encode(prompt)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt (text, or a list of token ids) or several -> several."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = _listed(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise ValueError(
            f"prompt: {type(prompts).__name__} is neither text, a list of token ids, nor a list of either"
        )
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return cast("Sequence[Prompt]", prompts)


def one_each(name: str, given: Any, kind: type, count: int) -> Sequence[Any]:
    """A value for each prompt, from one for all or a list of them."""
    if given is None or isinstance(given, kind):
        return [given] * count
    if not isinstance(given, list | tuple):
        raise ValueError(f"{name}: {type(given).__name__} is neither {kind.__name__} nor a list of them")
    if len(given) != count:
        raise ValueError(f"{name}: {len(given)} given for {count} prompts")
    if not all(isinstance(item, kind) or (item is None and kind is not int) for item in given):
        raise ValueError(f"{name}: not every entry of the list is {kind.__name__}")
    return given


def _token_ids(prompt: Sequence[int]) -> list[int]:
    prompt = _listed(prompt)
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
    if not is_list or any(isinstance(i, bool) or not isinstance(i, Integral) for i in prompt):
        raise ValueError("prompt: must be text or a list of token ids (whole numbers)")
    return list(map(int, prompt))


def _listed(prompt: Any) -> Any:
    """An array [num_tokens] of whole numbers as a list; anything else as it is."""
    numpy = sys.modules.get("numpy")  # where nobody has imported it, nobody has an array
    if numpy is None or not isinstance(prompt, numpy.ndarray):
        return prompt
    return prompt.tolist() if prompt.ndim == 1 and prompt.dtype.kind in "iu" else prompt
