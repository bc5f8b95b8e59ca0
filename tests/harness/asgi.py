"""A client that calls an ASGI application directly: no sockets, no time."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridserve.server.app import create_app
from hybridserve.server.service import Service
from tests.harness.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Headers = Sequence[tuple[str, str]]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    num_writes: int = 0

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Of a response that is one, in the shape that it must have."""
        assert self.headers["content-type"] == "application/json"
        assert set(self.json) == {"error"}, self.body
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Of a stream, as a parser of server-sent events sees them; the last is "[DONE]"."""
        assert self.headers["content-type"].startswith("text/event-stream")
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == "", "the last event is not complete"
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        data = [block.removeprefix("data: ") for block in blocks]
        assert data.count("[DONE]") == 1
        assert data[-1] == "[DONE]"
        return [*map(json.loads, data[:-1]), "[DONE]"]


class Call:
    """A request that is being answered."""

    def __init__(self, app: Any, scope: dict[str, Any], chunks: Sequence[bytes]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._arrived = asyncio.Condition()
        self._inbox = [
            {"type": "http.request", "body": chunk, "more_body": i < len(chunks) - 1}
            for i, chunk in enumerate(chunks)
        ]
        self._gone = asyncio.Event()
        self.may_write = asyncio.Event()
        """Clear it for a client that reads no more."""
        self.may_write.set()
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._inbox:
            return self._inbox.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.may_write.wait()
        if not self._gone.is_set():
            async with self._arrived:
                self.sent.append(message)
                self._arrived.notify_all()

    def leave(self) -> None:
        self._gone.set()

    async def until(self, text: bytes) -> None:
        """Until the body holds `text`."""
        async with asyncio.timeout(10), self._arrived:
            await self._arrived.wait_for(lambda: text in self.body)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def answer(self) -> Answer:
        async with asyncio.timeout(20):
            await self.task
        begin, *rest = self.sent
        assert begin["type"] == "http.response.start"
        assert [message.get("more_body", False) for message in rest] == [True] * (len(rest) - 1) + [False]
        headers = {name.decode(): value.decode() for name, value in begin["headers"]}
        assert len(headers) == len(begin["headers"]), "a header twice"
        return Answer(begin["status"], headers, self.body, len(rest))


class Client:
    """Of one server; `engine` and `service` are what is behind it."""

    def __init__(self, engine: FakeEngine, service: Service) -> None:
        self.engine = engine
        self.service = service
        self.app = create_app(service)

    def start(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Headers = (),
        *,
        chunks: Sequence[bytes] | None = None,
    ) -> Call:
        """`body` is JSON, or bytes as they are."""
        if chunks is None:
            raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
            chunks = [raw]
        given = [("host", "localhost:8000"), *headers]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        return Call(self.app, scope, chunks)

    async def call(
        self, method: str, path: str, body: Any = None, headers: Headers = (), **more: Any
    ) -> Answer:
        return await self.start(method, path, body, headers, **more).answer()

    async def get(self, path: str, headers: Headers = ()) -> Answer:
        return await self.call("GET", path, None, headers)

    async def post(self, path: str, body: Any, headers: Headers = ()) -> Answer:
        return await self.call("POST", path, body, headers)

    async def complete(self, **fields: Any) -> Answer:
        return await self.post("/v1/completions", fields)

    async def chat(self, **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", fields)

    async def series(self) -> dict[str, float]:
        """What /metrics shows: `name{label="value"}` -> value."""
        answer = await self.get("/metrics")
        assert answer.status == 200, answer.body
        lines = [line for line in answer.body.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def serving(scenario: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    """Runs `scenario` against a server with a scripted engine; `options` are those of `FakeEngine`. Every
    request must have been given up by its end, whatever became of it."""

    async def run() -> None:
        async with FakeEngine(**options) as engine:
            service = Service(engine, engine.config)
            await service.prepare()
            client = Client(engine, service)
            await scenario(client)
            for _ in range(100):
                if not engine.num_in_flight and not service.num_sequences:
                    break
                await asyncio.sleep(0.01)
            assert (engine.num_in_flight, service.num_sequences) == (0, 0)

    asyncio.run(run())
