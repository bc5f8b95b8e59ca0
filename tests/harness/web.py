"""A server with a scripted engine behind a real port, in a thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import uvicorn

from hybridserve.server.app import create_app
from hybridserve.server.service import Service
from tests.harness.fake_engine import FakeEngine
from tests.harness.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hybridserve.core.request import SamplingParams
    from hybridserve.engine.messages import EngineRequest
    from hybridserve.frontend.protocol import ToEngine


EOS = 2
"""The id with which the demo model ends an answer."""


class Web:
    """`url` ends in a slash. Of the engine, only what may be asked from another thread."""

    def __init__(self, url: str, engine: FakeEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.engine = engine
        self._loop = loop

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call something of the engine in its own thread."""
        self._loop.call_soon_threadsafe(function, *args)

    @property
    def received(self) -> list[ToEngine]:
        return list(self.engine.fake.received)

    @property
    def requests(self) -> list[EngineRequest]:
        return [message.request for message in self.received if type(message).__name__ == "Add"]

    @property
    def params(self) -> SamplingParams:
        """Of the newest request."""
        return self.requests[-1].params

    def prompts(self) -> list[str]:
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        return ["".join(map(tokenizer.decode_token, request.prompt_ids)) for request in self.requests]


@contextlib.contextmanager
def web_server(say: Callable[[EngineRequest], str] | str | None = None, **options: Any) -> Iterator[Web]:
    """`say`: the text that a request is answered with; by default, its prompt. `options` are those of
    `FakeEngine`."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    made: list[tuple[Web, uvicorn.Server]] = []

    def reply(request: EngineRequest) -> list[list[int]]:
        tokenizer = made[0][0].engine.tokenizer
        assert tokenizer is not None
        text = say(request) if callable(say) else say or ""
        return [[*tokenizer.encode(text, add_special_tokens=False), EOS]]

    async def main() -> None:
        async with FakeEngine(reply=None if say is None else reply, **options) as engine:
            service = Service(engine, engine.config)
            await service.prepare()
            config = uvicorn.Config(create_app(service), lifespan="off", log_config=None, access_log=False)
            server = uvicorn.Server(config)
            server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
            made.append((Web(url, engine, asyncio.get_running_loop()), server))
            await server.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert wait_until(lambda: bool(made) and made[0][1].started, 60)
        yield made[0][0]
    finally:
        made[0][1].should_exit = made[0][1].force_exit = True
        thread.join(20)
        listener.close()
