"""Targets for tests of the bench client: a scripted one in a time that costs none, and a small HTTP server
that answers as it is told, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from hybridserve.bench.target import Arrival, RequestFailed, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator

    from hybridserve.bench.target import TargetRequest

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Where there is nothing to do until a moment, it is that moment."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("nothing will ever happen")
        if not events:
            self.now += timeout or 0
        return events


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, with a clock that begins at 0 and waits for nobody."""

    def make_loop() -> asyncio.AbstractEventLoop:
        selector = _JumpingSelector()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(work)


Step = tuple[float, Arrival | RequestFailed]
"""Seconds to wait, and what then comes."""


class ScriptedTarget:
    """`script` says of each request what comes of it and when."""

    name = "scripted"
    vocab_size = None
    max_model_len = None
    counts = "told"

    def __init__(self, script: Callable[[TargetRequest], list[Step]]) -> None:
        self.script = script
        self.seen: list[tuple[float, TargetRequest]] = []
        self.num_running = self.most_running = 0

    async def __aenter__(self) -> ScriptedTarget:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def adapters(self) -> list[str]:
        return ["a", "b"]

    async def rehearse(self, request: TargetRequest, *, needs_ids: bool) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {"model": self.name}

    async def stream(self, request: TargetRequest) -> AsyncGenerator[Arrival]:
        self.seen.append((asyncio.get_running_loop().time(), request))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            for seconds, step in self.script(request):
                await asyncio.sleep(seconds)
                if isinstance(step, RequestFailed):
                    raise step
                yield step
        finally:
            self.num_running -= 1


def tokens(count: int, *, text: str | None = None) -> Arrival:
    return Arrival(text="x" * count if text is None else text, num_events=1, num_tokens=count)


def end(num_prompt: int, num_output: int, num_cached: int | None = None) -> Arrival:
    return Arrival(usage=Usage(num_prompt, num_output, num_cached), finish_reason="length")


def steady(seconds: float, count: int = 4) -> Callable[[TargetRequest], list[Step]]:
    """One token each so many seconds."""

    def script(request: TargetRequest) -> list[Step]:
        return [*((seconds, tokens(1)) for _ in range(count)), (0.0, end(len(request.prompt), count))]

    return script


@dataclass
class Reply:
    """The parts of a body, each written apart, `pause` seconds after another. Status 0 hangs up at once; with
    `is_cut`, after the parts."""

    parts: list[bytes]
    status: int = 200
    content_type: str = "text/event-stream"
    pause: float = 0.0
    is_cut: bool = False


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def completion(text: str, count: int, *, usage: bool = True, **choice: Any) -> bytes:
    """A piece of /v1/completions; `count`: tokens until here."""
    told = {"usage": {"prompt_tokens": 3, "completion_tokens": count}} if usage else {}
    return event(choices=[{"index": 0, "text": text, "finish_reason": None, **choice}], **told)


def usage_event(num_prompt: int, num_output: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": num_prompt, "completion_tokens": num_output})


DONE = b"data: [DONE]\n\n"


@dataclass
class StubServer:
    """HTTP/1.1 on a free port of this machine; `respond` (path, headers, body) says what to answer."""

    respond: Callable[[str, dict[str, str], Any], Reply]
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    url: str = ""
    num_hung_up: int = 0
    """Connections that the client closed before the whole answer was sent."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().splitlines()
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                path, body = first.split()[1], json.loads(data) if data else None
                self.requests.append((path, headers, body))
                await self._answer(self.respond(path, headers, body), writer)

    async def _answer(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        if not reply.status:
            raise ConnectionAbortedError
        head = f"HTTP/1.1 {reply.status} OK\r\ncontent-type: {reply.content_type}\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        try:
            for part in reply.parts:
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await writer.drain()
                await asyncio.sleep(reply.pause)
            if reply.is_cut:
                raise ConnectionAbortedError
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except ConnectionError:
            self.num_hung_up += 1
            raise


@contextlib.contextmanager
def stub_server(respond: Callable[[str, dict[str, str], Any], Reply]) -> Iterator[StubServer]:
    """In a thread, for as long as the context."""
    stub = StubServer(respond)
    ready = threading.Event()
    over: list[Callable[[], object]] = []

    async def live() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(stub._serve, "127.0.0.1", 0)
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        over.append(lambda: loop.call_soon_threadsafe(stop.set))
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    ready.wait()
    try:
        yield stub
    finally:
        over[0]()
        thread.join()


def openai(parts: Callable[[str, Any], list[bytes]], **models: Any) -> Callable[..., Reply]:
    """Answers /v1/models with "stub" and others, and everything else with what `parts` (path, body) gives."""

    def respond(path: str, headers: dict[str, str], body: Any) -> Reply:
        if path == "/v1/models":
            listed = [{"id": "stub"}, *({"id": name, "parent": "stub"} for name in models)]
            return Reply([json.dumps({"data": listed}).encode()], content_type="application/json")
        if body is None:
            return Reply([b'{"detail": "not found"}'], 404, "application/json")
        return Reply(parts(path, body))

    return respond
