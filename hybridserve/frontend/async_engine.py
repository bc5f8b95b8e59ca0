"""The asyncio API: an engine in a process of its own, for programs that do other things while it computes.

Knows prompts and what users call things; neither imports torch nor computes. The event loop is never blocked:
prompts become tokens in worker threads, tokens become text in the thread that receives them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from hybridserve.core.limits import check_length, check_vocabulary
from hybridserve.core.request import SamplingParams
from hybridserve.engine.messages import AdapterInfo, EngineView
from hybridserve.frontend import protocol
from hybridserve.frontend.client import EngineClient
from hybridserve.frontend.errors import EngineDead, EngineState, EngineUnavailable
from hybridserve.frontend.process import EngineProcess
from hybridserve.models.hub import resolve_model
from hybridserve.prompts import PromptReader, config_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from hybridserve.config.schema import EngineConfig
    from hybridserve.engine.messages import EngineRequest
    from hybridserve.frontend.client import OnEnd, OnMessage
    from hybridserve.frontend.streams import RequestStream
    from hybridserve.outputs import RequestOutput
    from hybridserve.prompts import Message, Prompt
    from hybridserve.text import Tokenizer, Tools

T = TypeVar("T")

NUM_WORKERS = 4
"""Threads that read prompts."""


class AsyncLLM:
    """A model that generates while the program does other things.

    `async with AsyncLLM("demo") as engine`, or `start`, `wait_ready` and `close`. The arguments are those of
    `LLM`. It belongs to the event loop that it was started in.

    Raises ValueError, naming the key, for a configuration without sense; for one that can't be served,
    `wait_ready` does. All that needs the engine raises EngineUnavailable before it is ready, EngineDead when
    it has ended.
    """

    _entry: ClassVar[str] = "hybridserve.frontend.engine_process"
    """The module that the engine's process runs."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: str | os.PathLike[str] | EngineConfig | None = None,
        **options: Any,
    ) -> None:
        self.config = config_of(model, config, options)
        self.phases: list[tuple[str, float]] = []
        """The parts of starting up that have passed, and the seconds that each took."""
        self._prompts = PromptReader(None)
        self._client: EngineClient | None = None
        self._tokenizing: asyncio.Task[None] | None = None
        self._death_callbacks: list[Callable[[EngineDead], None]] = []
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="hybridserve-text")
        self._grammar_worker = ThreadPoolExecutor(1, thread_name_prefix="hybridserve-grammar")
        """Those who wait for a hard one here are in nobody else's way."""

    # ---- life

    async def start(self, *, on_phase: Callable[[str, float | None], None] | None = None) -> None:
        """Start the engine's process, and return. `on_phase` is called in the event loop when a part of
        starting up begins, with (name, None), and when it has passed, with (name, seconds)."""
        if self._client is not None:
            raise RuntimeError("this AsyncLLM has been started before")

        def passed(name: str, seconds: float | None) -> None:
            if seconds is not None:
                self.phases.append((name, seconds))
            if on_phase is not None:
                on_phase(name, seconds)

        self._client = EngineClient(self._make_process, passed)
        self._client.death_callbacks = self._death_callbacks
        self._tokenizing = asyncio.create_task(self._load(self._client, passed))

    def _make_process(self, on_message: OnMessage, on_end: OnEnd) -> EngineProcess:
        return EngineProcess(self._entry, self.config.server.heartbeat_seconds, on_message, on_end)

    async def _load(self, client: EngineClient, passed: Callable[[str, float | None], None]) -> None:
        """Load the tokenizer while the process imports what it needs; then tell that what to load."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        passed("tokenizer", None)
        try:
            path, self._prompts = await self.in_worker(_read_model, self.config)
            passed("tokenizer", loop.time() - begin)
            client.load(self.config, path, self._prompts.tokenizer)
        except Exception as error:
            client.give_up(error)

    async def wait_ready(self) -> None:
        """Until the engine takes requests. ValueError where the configuration, or what it names, can't be
        served; EngineDead where the engine died for another reason."""
        await self._started().wait_started()

    def on_death(self, callback: Callable[[EngineDead], None]) -> None:
        """Have `callback` called, in the event loop, if the engine ends by anything but `close`."""
        self._death_callbacks.append(callback)

    async def drain(self, seconds: float | None = None) -> bool:
        """Take no more requests and wait until those in flight have ended, so long at most. True if they
        have."""
        return self._client is None or await self._client.drain(seconds)

    async def close(self) -> None:
        """End the engine and its process. Requests in flight raise EngineDead. Again, nothing happens."""
        if self._tokenizing is not None:
            self._tokenizing.cancel()
        if self._client is not None:
            await self._client.close()
        self._prompts.close()
        self._grammar_worker.shutdown(wait=False, cancel_futures=True)
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
            await self.wait_ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- what it is

    @property
    def state(self) -> EngineState:
        return EngineState.STARTING if self._client is None else self._client.state

    @property
    def error(self) -> EngineDead | None:
        """Why it is dead."""
        return None if self._client is None else self._client.error

    @property
    def num_in_flight(self) -> int:
        """Requests that were submitted and have not ended."""
        return 0 if self._client is None else self._client.num_in_flight

    @property
    def step_seconds(self) -> float:
        """How long the engine had been in the same step when it last said so; 0 where it rests."""
        return 0.0 if self._client is None else self._client.step_seconds

    @property
    def plan(self) -> dict[str, Any]:
        """The engine's plan, as `EnginePlan.to_dict` has it."""
        return self._ready().plan

    @property
    def plan_table(self) -> str:
        return self._ready().table

    @property
    def max_model_len(self) -> int:
        return self._ready().max_model_len

    @property
    def vocab_size(self) -> int:
        return self._ready().vocab_size

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where the model has none, for the reason in `tokenizer_error`."""
        return self._prompts.tokenizer

    @property
    def tokenizer_error(self) -> str:
        return self._prompts.tokenizer_error

    # ---- requests

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        priority: int = 0,
        request_id: str | None = None,
        cache_salt: str | None = None,
        shown_ids: Collection[int] = (),
        on_taken: Callable[[], None] | None = None,
    ) -> RequestStream:
        """Queue a request; returns, when the engine has it, the stream of what comes of it. The caller is to
        close that. ValueError, naming the field, for a request that can't be served, and nothing runs.

        `shown_ids`: special tokens that are part of the text, as no others are. Only requests with the same
        `cache_salt` share what has been computed of prompts. `on_taken` is called in the event loop when the
        engine says that it has the request, though the caller may have left by then."""
        client = self._started()
        name = client.reserve(request_id)
        try:
            if isinstance(params, SamplingParams):
                params = await self.checked(params)
            request, payload, text = await self.in_worker(
                self._read, client.next_id(), prompt, params, adapter, priority, cache_salt
            )
        except BaseException:
            client.release(name)
            raise
        return await client.submit(name, request, payload, text, shown_ids, on_taken)

    def _read(
        self,
        engine_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        adapter: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> tuple[EngineRequest, bytes, str | None]:
        """The request, its message and the prompt's text. What this refuses the engine never sees."""
        ready = self._ready()
        request, text = self._prompts.request(
            engine_id, prompt, params, adapter, priority, ready.max_model_len, cache_salt
        )
        check_length(len(request.prompt_ids), request.params, ready.max_model_len)
        check_vocabulary(request.prompt_ids, request.params, ready.vocab_size)
        return request, protocol.encode(protocol.Add(request)), text

    async def checked(self, params: SamplingParams) -> SamplingParams:
        """The parameters as they will be used. ValueError, naming the field, for structured outputs that
        can't be enforced, or would take too long."""
        if params.structured_outputs is None:
            return params
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._grammar_worker, self._prompts.checked, params)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt, given as text or token ids: yields the same output again and again as it
        grows, at most once a step, and last when it is `finished`.

        Leaving the iterator (`aclose`, a `break`, cancellation) aborts the request. ValueError, naming the
        field, before anything runs; EngineDead if the engine dies meanwhile.
        """
        stream = await self.submit(
            prompt, params, adapter=adapter, priority=priority, request_id=request_id, cache_salt=cache_salt
        )
        output = stream.new_output()
        async with contextlib.aclosing(stream):
            async for deltas in stream:
                for delta in deltas:
                    output.add(delta)
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation, a list of {"role", "content"}, through the model's chat template; otherwise
        as `generate`."""
        prompt = await self.encode_chat(messages)
        outputs = self.generate(
            prompt, params, adapter=adapter, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        async with contextlib.aclosing(outputs):  # type: ignore[type-var]  # it is an asynchronous generator
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request; what it has until then is good, and its finish reason is "abort". One that is not in
        flight is left alone."""
        self._started().abort(request_id)

    # ---- text

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, as of a prompt. ValueError where there is no tokenizer."""
        encode = self._prompts.text("prompt").encode
        return await self.in_worker(partial(encode, text, add_special_tokens=add_special_tokens))

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
    ) -> list[int]:
        """The token ids of a conversation, and of what the model is told of tools. ValueError for what the
        chat template refuses."""
        encode = partial(self._prompts.chat_ids, add_generation_prompt=add_generation_prompt, tools=tools)
        return await self.in_worker(encode, messages)

    async def decode(self, token_ids: Iterable[int]) -> str:
        return await self.in_worker(self._prompts.text("prompt").decode, token_ids)

    async def in_worker(self, function: Callable[..., T], *args: Any) -> T:
        """Call something slow in one of the threads that read prompts."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, partial(function, *args))

    # ---- adapters and numbers

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """As `LLM.load_adapter`."""
        name, path = _text(name), _text(path)
        return await self._call(AdapterInfo, protocol.LoadAdapter, name=name, path=path)

    async def unload_adapter(self, name: str) -> bool:
        """As `LLM.unload_adapter`."""
        return await self._call(bool, protocol.UnloadAdapter, name=_text(name))

    async def pin_adapter(self, name: str) -> None:
        """As `LLM.pin_adapter`."""
        await self._call(type(None), protocol.PinAdapter, name=_text(name))

    async def unpin_adapter(self, name: str) -> None:
        """As `LLM.unpin_adapter`."""
        await self._call(type(None), protocol.UnpinAdapter, name=_text(name))

    async def list_adapters(self) -> list[AdapterInfo]:
        """As `LLM.list_adapters`."""
        return await self._call(list[AdapterInfo], protocol.ListAdapters)

    async def stats(self) -> dict[str, Any]:
        """As `LLM.stats`; between two steps, so it waits for the one that is running."""
        return await self._call(dict[str, Any], protocol.GetStats)

    async def view(self) -> EngineView:
        """The engine as it stands between two steps: what `stats` has, and the arena slab by slab."""
        return await self._call(EngineView, protocol.GetView)

    async def _call(self, kind: type[T], message: Callable[..., protocol.Call], **fields: str) -> T:
        return await self._started().call(lambda call_id: message(call_id=call_id, **fields), kind)

    def _started(self) -> EngineClient:
        if self._client is None:
            raise EngineUnavailable("the engine has not been started")
        return self._client

    def _ready(self) -> protocol.Ready:
        ready = self._started().ready
        if ready is None:
            raise self.error.copy() if self.error else EngineUnavailable("the engine is starting")
        return ready


def _read_model(config: EngineConfig) -> tuple[Path, PromptReader]:
    path = resolve_model(config.model)
    return path, PromptReader.load(config, path)


def _text(value: object) -> str:
    """An adapter's name or directory, if it can be one."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(value, str):
        raise ValueError(f"adapter: {value!r} is not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"adapter: {value!r} holds half of a surrogate pair, which is not text") from None
    return value
