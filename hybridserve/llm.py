"""The blocking Python API: an engine in the caller's own thread. Not thread-safe."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from hybridserve.config.loader import load_config
from hybridserve.config.schema import EngineConfig
from hybridserve.core.request import FinishReason, SamplingParams
from hybridserve.engine.core import EngineCore
from hybridserve.engine.messages import EngineRequest
from hybridserve.engine.planner import EnginePlan, make_plan
from hybridserve.models.hub import resolve_model
from hybridserve.outputs import OutputProcessor, RequestOutput, StreamAborted
from hybridserve.text import Tokenizer, TokenizerMissing

if TYPE_CHECKING:
    from types import TracebackType

    from hybridserve.engine.adapters import AdapterInfo
    from hybridserve.engine.stats import EngineStats

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model ready to generate.

    `model` is a directory in Hugging Face format, a hub id, or "demo"; `config` a YAML file, or an
    `EngineConfig` that says everything. Every other key of the configuration is an option, flat
    (`max_num_seqs=8`) or nested (`cache={"block_size": 32}`).

    Raises ValueError, naming the key, for a configuration that can't be served.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: str | os.PathLike[str] | EngineConfig | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, str | os.PathLike | None):
            raise ValueError(f"model: {type(model).__name__} is neither a directory's name nor a hub id")
        if not isinstance(config, EngineConfig):
            self.config = load_config(None if model is None else str(model), config, options)
        elif model is not None or options:
            raise ValueError("config: an EngineConfig says everything; give no model or options beside it")
        else:
            self.config = config
        path = resolve_model(self.config.model)
        self.plan: EnginePlan = make_plan(self.config, path)
        self.tokenizer: Tokenizer | None = None
        self._tokenizer_error = ""
        try:
            self.tokenizer = Tokenizer.load(
                resolve_model(self.config.tokenizer) if self.config.tokenizer else path
            )
        except TokenizerMissing as error:
            if self.config.tokenizer:
                raise
            self._tokenizer_error = str(error)
        self._core = EngineCore.create(self.config, self.plan, path)
        self._processor = OutputProcessor(self.tokenizer)
        self._streams: dict[str, deque[str]] = {}
        self._finished: set[str] = set()
        self._ids = itertools.count()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        watch: Callable[[int, str], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, given as text or as token ids (a list, or an array of one axis);
        results are in the prompts' order.

        `params`, `adapter` (a name; None is the base model) and `priority` are one for all, or a list with
        one entry a prompt. Under `scheduler.policy: priority` a lower priority runs sooner. `progress` shows
        a bar on standard error; by default for more than one prompt on a terminal. `watch` is called with the
        index of a prompt and a piece of its text as pieces come. ValueError, naming the field, before
        anything runs.
        """
        many = _as_prompts(prompts)
        columns = zip(
            many,
            _one_each("params", params, SamplingParams, len(many)),
            _one_each("adapter", adapter, str, len(many)),
            _one_each("priority", priority, int, len(many)),
            strict=True,
        )
        requests = [self._request(*column) for column in columns]
        if progress is None:
            progress = len(many) > 1 and sys.stderr.isatty()
        return self._run(requests, progress, watch)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of {"role", "content"}, through the model's chat
        template; otherwise as `generate`."""
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError("messages: must be a list of {role, content} with at least one entry")
        one = isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if one else messages)
        prompts = [self._text("messages").chat_ids(conversation) for conversation in conversations]
        return self.generate(prompts, params, adapter=adapter, priority=priority, progress=progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        priority: int = 0,
    ) -> Iterator[str]:
        """Generate for one prompt, yielding pieces of text as they come. Closing the iterator aborts the
        request. Raises StreamAborted (a RuntimeError) where the engine gives the request up, as it does if
        the model's logits are not finite."""
        request, text = self._request(prompt, params, adapter, priority)
        if request.params.n != 1:
            raise ValueError(f"n: a stream has one continuation, not {request.params.n}")
        self._text("prompt")
        return self._stream(request, text)

    def check(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> None:
        """Raise the ValueError that `generate` would raise for this prompt, if any; nothing runs."""
        self._request(prompt, params, adapter, 0)

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """Let requests name the adapter in a directory: one under `lora.roots`, absolute or relative to a
        root. Returns what is now known of it, with a report on what was applied.

        A name that is in use means the new content for new requests, while those that run go on with the old
        one; if the content is equal, nothing happens. ValueError, saying what is wrong with the files, and
        nothing has changed; also where `lora.allow_runtime_loading` is off.
        """
        self._check_open()
        self._core.wait_for_load(self._core.adapters.load(name, path))
        return self._core.adapters.info(name)

    def unload_adapter(self, name: str) -> bool:
        """Refuse an adapter's name to new requests from now on; those that run go on. True if nothing is left
        of it, False if requests still use it: then it goes with the last of them. ValueError for a name that
        is unknown, and where `lora.allow_runtime_loading` is off."""
        self._check_open()
        return self._core.adapters.unload(name)

    def pin_adapter(self, name: str) -> None:
        """Keep an adapter on the device, whoever else needs room there, until `unpin_adapter` or until its
        content is unloaded. ValueError for an unknown name, and where no place would be left for others."""
        self._check_open()
        self._core.adapters.pin(name)

    def unpin_adapter(self, name: str) -> None:
        """Let an adapter make room for others again. ValueError for an unknown name."""
        self._check_open()
        self._core.adapters.unpin(name)

    def list_adapters(self) -> list[AdapterInfo]:
        """Every adapter that may be named, by name, and those that requests still use though their name is
        gone."""
        self._check_open()
        return self._core.adapters.infos()

    def stats(self) -> dict[str, Any]:
        """Counters since the start and gauges of this moment; with adapters, "adapters" maps each name that
        was used to its counters."""
        self._check_open()
        return self._core.gauges()

    def close(self) -> None:
        """Give the weights and the arena back; again, nothing happens. Requests are refused afterwards."""
        if not self._closed:
            self._closed = True
            self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        requests: Sequence[tuple[EngineRequest, str | None]],
        progress: bool,
        watch: Callable[[int, str], None] | None,
    ) -> list[RequestOutput]:
        waiting = {request.request_id for request, _ in requests}
        try:
            for request, prompt in requests:
                self._add(request, prompt)
                if watch is not None:
                    self._streams[request.request_id] = deque()
            with _progress_bar(len(requests), progress, self._core.stats) as advance:
                while waiting:
                    self._pump()
                    if watch is not None:
                        self._show(requests, watch)
                    done = self._finished & waiting
                    waiting -= done
                    self._finished -= done
                    advance(len(done))
        except BaseException:
            for request, _ in requests:
                self._drop(request.request_id)
            raise
        for request, _ in requests:
            self._streams.pop(request.request_id, None)
        return [self._processor.take(request.request_id) for request, _ in requests]

    def _show(
        self, requests: Sequence[tuple[EngineRequest, str | None]], watch: Callable[[int, str], None]
    ) -> None:
        for index, (request, _) in enumerate(requests):
            pieces = self._streams[request.request_id]
            while pieces:
                watch(index, pieces.popleft())

    def _stream(self, request: EngineRequest, prompt: str | None) -> Iterator[str]:
        self._add(request, prompt)
        pieces = self._streams[request.request_id] = deque()
        try:
            while request.request_id not in self._finished:
                self._pump()
                while pieces:
                    yield pieces.popleft()
            completion = self._processor.take(request.request_id).outputs[0]
            if completion.finish_reason == FinishReason.ABORT:
                raise StreamAborted(completion.stop_reason)
        finally:
            self._drop(request.request_id)

    def _add(self, request: EngineRequest, prompt: str | None) -> None:
        self._check_open()
        self._core.add(request)
        self._processor.add(request, prompt)

    def _drop(self, request_id: str) -> None:
        """Forget a request, whatever became of it."""
        self._core.abort(request_id)
        self._processor.discard(request_id)
        self._streams.pop(request_id, None)
        self._finished.discard(request_id)

    def _pump(self) -> None:
        """Run one step of the engine, for everybody who waits."""
        self._check_open()
        deltas, aborts = self._processor.process(self._core.step())
        for request_id, index in aborts:
            self._core.abort(request_id, index)
        for delta in deltas:
            if delta.text and delta.request_id in self._streams:
                self._streams[delta.request_id].append(delta.text)
            if delta.finished:
                self._finished.add(delta.request_id)

    def _request(
        self, prompt: Prompt, params: SamplingParams | None, adapter: str | None, priority: int
    ) -> tuple[EngineRequest, str | None]:
        self._check_open()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params: {params!r} is not SamplingParams")
        if not isinstance(adapter, str | None):
            raise ValueError(f"adapter: {adapter!r} is not a name")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop: needs a tokenizer, and there is none ({self._tokenizer_error})")
        if isinstance(prompt, str):
            # an empty text stays empty, though the tokenizer would put special tokens around it
            text, prompt_ids = prompt, self._text("prompt").encode(prompt) if prompt else []
        else:
            text, prompt_ids = None, _token_ids(prompt)
        request = EngineRequest(
            request_id=str(next(self._ids)),
            prompt_ids=prompt_ids,
            params=params,
            adapter=adapter,
            priority=priority,
            arrival=time.monotonic(),
        )
        self._core.check(request)
        return request, text

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM has been closed")

    def _text(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{field}: {self._tokenizer_error}; give prompts as token ids instead")
        return self.tokenizer


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
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


def _token_ids(prompt: Sequence[int]) -> list[int]:
    prompt = _listed(prompt)
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
    if not is_list or any(isinstance(i, bool) or not isinstance(i, Integral) for i in prompt):
        raise ValueError("prompt: must be text or a list of token ids (whole numbers)")
    return list(map(int, prompt))


def _listed(prompt: Any) -> Any:
    """An array [num_tokens] of whole numbers as a list; anything else as it is."""
    is_ids = isinstance(prompt, np.ndarray) and prompt.ndim == 1 and prompt.dtype.kind in "iu"
    return prompt.tolist() if is_ids else prompt


def _one_each(name: str, given: Any, kind: type, count: int) -> Sequence[Any]:
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


@contextlib.contextmanager
def _progress_bar(total: int, visible: bool, stats: EngineStats) -> Iterator[Callable[[int], None]]:
    """Yields a function that says that so many more requests are done."""
    if not visible:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=total, rate="")
        start, before = time.monotonic(), stats.num_generated_tokens

        def advance(done: int) -> None:
            rate = (stats.num_generated_tokens - before) / max(time.monotonic() - start, 1e-9)
            bar.update(task, advance=done, rate=f"{rate:,.0f} tokens/s")

        yield advance
