"""The blocking Python API: an engine in the caller's own thread. Not thread-safe."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from hybridserve.core.request import FinishReason, SamplingParams
from hybridserve.engine.alternatives import make_plan_or_suggest
from hybridserve.engine.core import EngineCore
from hybridserve.models.hub import resolve_model
from hybridserve.outputs import OutputProcessor, RequestOutput, StreamAborted
from hybridserve.prompts import Message, Prompt, PromptReader, as_prompts, config_of, one_each

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from hybridserve.config.schema import EngineConfig
    from hybridserve.engine.messages import AdapterInfo, EngineRequest
    from hybridserve.engine.plan import EnginePlan
    from hybridserve.engine.stats import EngineStats
    from hybridserve.text import Tokenizer


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
        self.config = config_of(model, config, options)
        path = resolve_model(self.config.model)
        self.plan: EnginePlan = make_plan_or_suggest(self.config, path)
        self._prompts = PromptReader.load(self.config, path)
        self._core = EngineCore.create(self.config, self.plan, path)
        self._interrupts = self._core.interrupts
        self._processor = OutputProcessor(self._prompts.tokenizer)
        self._outputs: dict[str, RequestOutput] = {}
        self._streams: dict[str, deque[str]] = {}
        self._finished: set[str] = set()
        self._open: dict[str, weakref.ref[TextStream]] = {}
        """Streams that have not ended, by their requests. One that the caller has forgotten is found dead."""
        self._ids = itertools.count()
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._prompts.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        progress: bool | None = None,
        watch: Callable[[int, str], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, given as text or as token ids (a list, or an array of one axis);
        results are in the prompts' order.

        `params`, `adapter` (a name; None is the base model) and `priority` are one for all, or a list with
        one entry a prompt. Under `scheduler.policy: priority` a lower priority runs sooner. Only requests
        with the same `cache_salt` share what has been computed of prompts. `progress` shows a bar on standard
        error; by default for more than one prompt on a terminal. `watch` is called with the index of a prompt
        and a piece of its text as pieces come. ValueError, naming the field, before anything runs.
        """
        many = as_prompts(prompts)
        columns = zip(
            many,
            one_each("params", params, SamplingParams, len(many)),
            one_each("adapter", adapter, str, len(many)),
            one_each("priority", priority, int, len(many)),
            strict=True,
        )
        requests = [self._request(*column, cache_salt) for column in columns]
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
        cache_salt: str | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of {"role", "content"}, through the model's chat
        template; otherwise as `generate`."""
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError("messages: must be a list of {role, content} with at least one entry")
        one = isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if one else messages)
        prompts = [self._prompts.chat_ids(conversation) for conversation in conversations]
        options: dict[str, Any] = {"adapter": adapter, "priority": priority, "cache_salt": cache_salt}
        return self.generate(prompts, params, progress=progress, **options)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> TextStream:
        """Generate for one prompt, yielding pieces of text as they come. The request begins with this call,
        on the content that its adapter has now, and closing the iterator aborts it. Raises StreamAborted (a
        RuntimeError) where the engine gives the request up, as it does if the model's logits are not
        finite."""
        request, text = self._request(prompt, params, adapter, priority, cache_salt)
        if request.params.n != 1:
            raise ValueError(f"n: a stream has one continuation, not {request.params.n}")
        self._prompts.text("prompt")
        with self._interrupts.held():
            self._add(request, text)
            self._streams[request.request_id] = deque()
            stream = TextStream(self, request.request_id)
            self._open[request.request_id] = weakref.ref(stream)
            return stream

    def check(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> None:
        """Raise the ValueError that `generate` would raise for this prompt, if any; nothing runs."""
        self._request(prompt, params, adapter, 0)

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """Let requests name the adapter in a directory: one under `lora.roots`, absolute or relative to a
        root. Returns what is now known of it, with a report on what was applied.

        A name that is in use means the new content for new requests, while those that run go on with the old
        one; if the content is equal, nothing happens. Requests that run go on meanwhile. ValueError, saying
        what is wrong with the files, and nothing has changed; also for other content under a name that is
        pinned, and where `lora.allow_runtime_loading` is off.
        """
        self._check_open()
        with self._interrupts.held():
            future = self._core.adapters.load(name, path)
            try:
                while not future.done() and self._core.has_work:
                    self._pump()
                self._core.wait_for_load(future)
            except BaseException:
                future.cancel()
                raise
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
            self._prompts.close()
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
        with self._interrupts.held():
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
            return [self._outputs.pop(request.request_id) for request, _ in requests]

    def _show(
        self, requests: Sequence[tuple[EngineRequest, str | None]], watch: Callable[[int, str], None]
    ) -> None:
        for index, (request, _) in enumerate(requests):
            pieces = self._streams[request.request_id]
            while pieces:
                piece = pieces.popleft()
                with self._interrupts.let_through():
                    watch(index, piece)

    def _wait_for_piece(self, request_id: str) -> deque[str]:
        """A stream's pieces, at its end none."""
        self._check_open()
        pieces = self._streams[request_id]
        while not pieces and request_id not in self._finished:
            self._pump()
        completion = self._outputs[request_id].outputs[0]
        if not pieces and completion.finish_reason == FinishReason.ABORT:
            raise StreamAborted(completion.stop_reason)
        return pieces

    def _add(self, request: EngineRequest, prompt: str | None) -> None:
        self._check_open()
        self._core.add(request)
        self._outputs[request.request_id] = RequestOutput.empty(request, prompt)
        self._processor.add(request)

    def _drop(self, request_id: str) -> None:
        """Forget a request, whatever became of it."""
        with self._interrupts.held():
            self._core.abort(request_id)
            self._processor.discard(request_id)
            self._outputs.pop(request_id, None)
            self._streams.pop(request_id, None)
            self._finished.discard(request_id)
            self._open.pop(request_id, None)

    def _pump(self) -> None:
        """Run one step of the engine, for everybody who waits. Interrupts are held off: what comes is for
        several."""
        self._check_open()
        deltas, aborts = self._processor.process(self._core.step())
        for request_id, index in aborts:
            self._core.abort(request_id, index)
        for delta in deltas:
            self._outputs[delta.request_id].add(delta)
            if delta.text and delta.request_id in self._streams:
                self._streams[delta.request_id].append(delta.text)
            if delta.finished:
                self._finished.add(delta.request_id)

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        adapter: str | None,
        priority: int,
        cache_salt: str | None = None,
    ) -> tuple[EngineRequest, str | None]:
        self._check_open()
        request, text = self._prompts.request(
            str(next(self._ids)), prompt, params, adapter, priority, self.plan.max_model_len, cache_salt
        )
        self._core.check(request)
        return request, text

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM has been closed")
        for request_id in [name for name, stream in self._open.items() if stream() is None]:
            self._drop(request_id)


class TextStream(Iterator[str]):
    """The pieces of one request's text, from `LLM.stream`. Whoever asks for the next one drives the engine;
    the request advances as well when others do."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm: LLM | None = llm
        """Until the end: a stream that is over keeps no engine alive."""
        self._request_id = request_id

    def __next__(self) -> str:
        if (llm := self._llm) is None:
            raise StopIteration
        try:
            with llm._interrupts.held():
                pieces = llm._wait_for_piece(self._request_id)
            if not pieces:
                raise StopIteration
            return pieces.popleft()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort the request, if it has not finished; there are no more pieces."""
        if (llm := self._llm) is None:
            return
        with llm._interrupts.held():
            llm._drop(self._request_id)
            self._llm = None


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
