"""The event loop's side of an engine's process: what state it is in, who waits for what.

Knows messages, requests and their streams; does not know prompts. But for `_receive`, which the process's
receiving thread runs, all of it lives in the event loop that it was started in.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

from hybridserve.frontend import protocol
from hybridserve.frontend.errors import EngineClosed, EngineDead, EngineState, EngineUnavailable
from hybridserve.frontend.streams import RequestStream
from hybridserve.outputs import OutputProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from hybridserve.config.schema import EngineConfig
    from hybridserve.engine.messages import EngineRequest
    from hybridserve.frontend.process import EngineProcess
    from hybridserve.outputs import Delta
    from hybridserve.text import Tokenizer

    OnMessage = Callable[[protocol.FromEngine], None]
    OnEnd = Callable[[EngineDead, bool], None]
    MakeProcess = Callable[[OnMessage, OnEnd], EngineProcess]

T = TypeVar("T")

CLOSE_SECONDS = 10.0
"""For an engine that was told to close; then it is killed."""
CLOSED = "the engine was closed"


class EngineClient:
    """Drives one engine, from `start` to `close`."""

    def __init__(self, make_process: MakeProcess, on_phase: Callable[[str, float | None], None]) -> None:
        self.state = EngineState.STARTING
        self.error: EngineDead | None = None
        """Why it is dead."""
        self.is_mistake = False
        """Whether it is a user's mistake that it is."""
        self.ready: protocol.Ready | None = None
        self.step_seconds = 0.0
        """How long the engine had been in the same step when it last said so."""
        self.death_callbacks: list[Callable[[EngineDead], None]] = []
        self._on_phase = on_phase
        self._loop = asyncio.get_running_loop()
        self._started = asyncio.Event()
        """Or not, but no longer starting."""
        self._ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._processor = OutputProcessor(None)
        self._names: dict[str, RequestStream | None] = {}
        """Of all requests in flight. They have no stream until their prompts are read."""
        self._aborted: set[str] = set()
        """Names of those that were aborted before they had one."""
        self._streams: dict[str, RequestStream] = {}
        """By the engine's id."""
        self._on_taken: dict[str, Callable[[], None]] = {}
        """By the engine's id: who is to hear that it has a request, until it has said so or refused."""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self.process = make_process(self._receive, self._receive_end)
        self.process.start()

    # ---- life

    def load(self, config: EngineConfig, model_path: Path, tokenizer: Tokenizer | None) -> None:
        """Tell the process what to load."""
        self._processor = OutputProcessor(tokenizer)
        text = config.model_dump_json(exclude={"server"})  # the engine has no use for keys of users
        self._send(protocol.Start(text, str(model_path), self.process.beat_seconds))

    def give_up(self, error: Exception) -> None:
        """Nothing can be loaded. A ValueError is a user's mistake."""
        self.is_mistake = isinstance(error, ValueError)
        self.process.kill(str(error) if self.is_mistake else f"{type(error).__name__}: {error}")

    async def wait_started(self) -> None:
        await self._started.wait()
        if self.error is not None:
            raise ValueError(str(self.error)) if self.is_mistake else self.error.copy()

    @property
    def num_in_flight(self) -> int:
        return len(self._names)

    async def drain(self, seconds: float | None) -> bool:
        if self.state is EngineState.READY:
            self.state = EngineState.DRAINING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return not self._names

    async def close(self) -> None:
        was_ready = self.state in (EngineState.READY, EngineState.DRAINING)
        self._fail(EngineClosed(CLOSED))
        if was_ready:
            self._send(protocol.Close())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._ended.wait()
        self.process.kill(CLOSED)
        await self._ended.wait()

    def check_available(self) -> None:
        """EngineUnavailable where no request is taken."""
        if self.error is not None:
            raise self.error.copy()
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state}")

    # ---- requests

    def reserve(self, name: str | None) -> str:
        """A name for a request whose prompt is about to be read: `name`, or a new one. It is in flight."""
        self.check_available()
        if name is None:
            name = next(name for number in self._ids if (name := f"request-{number}") not in self._names)
        elif not isinstance(name, str):
            raise ValueError(f"request_id: {name!r} is not text")
        elif name in self._names:
            raise ValueError(f"request_id: {name[:100]!r} is the id of a request in flight")
        self._names[name] = None
        self._idle.clear()
        return name

    def next_id(self) -> str:
        """An engine's id for a request: never the same again, whatever its users call it."""
        return str(next(self._ids))

    async def submit(
        self,
        name: str,
        request: EngineRequest,
        payload: bytes,
        prompt: str | None,
        shown_ids: Collection[int] = (),
        on_taken: Callable[[], None] | None = None,
    ) -> RequestStream:
        """Send a request (`payload` is its message), and wait until the engine has queued it. ValueError
        where it refuses. Cancelling this aborts the request. `shown_ids`: special tokens that are part of its
        text. `on_taken` is called when the engine has it, even where nobody waits for it any more."""
        if self.error is not None:
            raise self.error.copy()
        stream = RequestStream(name, request, prompt, self._abandon)
        self._names[name] = self._streams[stream.engine_id] = stream
        if on_taken is not None:
            self._on_taken[stream.engine_id] = on_taken
        self._processor.add(request, shown_ids)
        self.process.send(payload)
        if name in self._aborted:
            self.abort(name)
        try:
            await stream.accepted()
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        return stream

    def abort(self, name: str) -> None:
        stream = self._names.get(name)
        if stream is not None:
            self._send(protocol.Abort(stream.engine_id))
        elif name in self._names:
            self._aborted.add(name)

    def release(self, name: str) -> None:
        """The request of this name is over, or never was."""
        self._names.pop(name, None)
        self._aborted.discard(name)
        if not self._names:
            self._idle.set()

    def _abandon(self, stream: RequestStream) -> None:
        """Its user has closed the stream."""
        if self._forget(stream.engine_id) is not None:
            self._send(protocol.Abort(stream.engine_id))

    def _forget(self, engine_id: str) -> RequestStream | None:
        stream = self._streams.pop(engine_id, None)
        if stream is not None:
            self._processor.discard(engine_id)
            self.release(stream.request_id)
        return stream

    # ---- calls

    async def call(self, make: Callable[[int], protocol.Call], kind: type[T]) -> T:
        """Have the engine do something; returns its answer, which is of type `kind`. ValueError where the
        engine says so."""
        if self.error is not None:
            raise self.error.copy()
        if self.ready is None:
            raise EngineUnavailable("the engine is starting")
        call_id = next(self._ids)
        answer = self._calls[call_id] = self._loop.create_future()
        try:
            self._send(make(call_id))
            value: T = protocol.decode(await answer, kind)
            return value
        finally:
            del self._calls[call_id]

    # ---- messages

    def _send(self, message: protocol.ToEngine) -> None:
        self.process.send(protocol.encode(message))

    def _receive(self, message: protocol.FromEngine) -> None:
        """In the receiving thread: make text of tokens there, and wake the loop once a step."""
        if not isinstance(message, protocol.Outputs):
            self._loop.call_soon_threadsafe(self._handle, message)
            return
        deltas, aborts = self._processor.process(message.outputs)
        for engine_id, index in aborts:
            self._send(protocol.Abort(engine_id, index))
        by_request: dict[str, list[Delta]] = {}
        for delta in deltas:
            by_request.setdefault(delta.request_id, []).append(delta)
        if by_request:
            self._loop.call_soon_threadsafe(self._deliver, by_request)

    def _receive_end(self, error: EngineDead, is_mistake: bool) -> None:
        """In the receiving thread, as the last thing that it does."""
        with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits any more
            self._loop.call_soon_threadsafe(self._end, error, is_mistake)

    def _deliver(self, by_request: dict[str, list[Delta]]) -> None:
        for engine_id, deltas in by_request.items():
            stream = self._streams.get(engine_id)
            if stream is not None:
                stream.add(deltas)
                if deltas[-1].finished:
                    self._forget(engine_id)

    def _handle(self, message: protocol.FromEngine) -> None:
        match message:
            case protocol.Admitted(accepted, refused):
                for engine_id in accepted:
                    if (on_taken := self._on_taken.pop(engine_id, None)) is not None:
                        on_taken()
                    if engine_id in self._streams:
                        self._streams[engine_id].accept()
                for engine_id, reason in refused:
                    self._on_taken.pop(engine_id, None)
                    if (stream := self._forget(engine_id)) is not None:
                        stream.fail(ValueError(reason))
            case protocol.Result(call_id, value):
                if (answer := self._calls.get(call_id)) is not None and not answer.done():
                    answer.set_result(value)
            case protocol.CallFailed(call_id, reason, is_value_error):
                if (answer := self._calls.get(call_id)) is not None and not answer.done():
                    answer.set_exception((ValueError if is_value_error else RuntimeError)(reason))
            case protocol.Beat(step_seconds):
                self.step_seconds = step_seconds
            case protocol.Phase(name, seconds):
                self._on_phase(name, seconds)
            case protocol.Ready() if self.error is None:
                self.ready, self.state = message, EngineState.READY
                self._started.set()

    def _end(self, error: EngineDead, is_mistake: bool) -> None:
        if self.error is None:
            self.is_mistake = self.is_mistake or is_mistake
            self._fail(error)
            for callback in self.death_callbacks:
                callback(error)
        self._ended.set()

    def _fail(self, error: EngineDead) -> None:
        """Nothing works any more: tell everybody who waits."""
        if self.error is not None:
            return
        self.error, self.state = error, EngineState.DEAD
        self._on_taken.clear()
        for engine_id in list(self._streams):
            if (stream := self._forget(engine_id)) is not None:
                stream.fail(error.copy())
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error.copy())
        self._started.set()
