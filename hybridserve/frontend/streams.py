"""One request as its user sees it: an asynchronous iterator of what the steps of the engine add.

Knows the event loop; lives in it alone. Does not know where the deltas come from.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from hybridserve.outputs import RequestOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridserve.engine.messages import EngineRequest
    from hybridserve.outputs import Delta


class RequestStream:
    """An asynchronous iterator of lists of deltas: all that has come since the last one was taken.

    It ends after a delta that is `finished`. If the engine dies, it raises EngineDead after what came before.
    `aclose` aborts the request, unless that has finished; so does whoever is cancelled while waiting here, if
    the stream is then closed (`contextlib.aclosing`).
    """

    def __init__(
        self,
        request_id: str,
        request: EngineRequest,
        prompt: str | None,
        on_close: Callable[[RequestStream], None],
    ) -> None:
        self.request_id = request_id
        """The user's name for it; the engine's is `engine_id`."""
        self.prompt = prompt
        self._request = request
        self._on_close = on_close
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._has_ended = False
        """Nothing more will come."""
        self._waiter: asyncio.Future[None] | None = None
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def engine_id(self) -> str:
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._request.prompt_ids

    @property
    def adapter(self) -> str | None:
        return self._request.adapter

    def new_output(self) -> RequestOutput:
        """Empty; `RequestOutput.add` of each delta makes of it what `LLM.generate` would return."""
        return RequestOutput.empty(
            msgspec.structs.replace(self._request, request_id=self.request_id), self.prompt
        )

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas, []
        return deltas

    async def aclose(self) -> None:
        """Abort the request if it has not finished; nothing more comes. Doesn't wait for the engine."""
        if not self._has_ended:
            self._has_ended = True
            self._on_close(self)
        self._deltas.clear()
        self._wake()

    # ---- for the engine's client

    async def accepted(self) -> None:
        """Returns when the engine has queued the request, raises what `refuse` or `fail` was given."""
        await self._accepted

    def accept(self) -> None:
        if not self._accepted.done():
            self._accepted.set_result(None)

    def add(self, deltas: list[Delta]) -> None:
        """What a step has brought."""
        if not self._has_ended:
            self._deltas += deltas
            self._has_ended = deltas[-1].finished
            self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing more will come, for this reason."""
        self._has_ended = True
        if self._accepted.done():
            self._error = error
        else:
            self._accepted.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
