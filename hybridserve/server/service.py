"""What the routes of one server share: the engine, who may still come in, names of models, metrics.

Knows whether the server takes requests; knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from hybridserve.frontend.errors import EngineState, EngineUnavailable
from hybridserve.server.errors import ApiError, bad_request, unavailable
from hybridserve.server.metrics import ServerMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hybridserve.config.schema import EngineConfig
    from hybridserve.frontend.async_engine import AsyncLLM

RETRY_AFTER = "1"
"""Seconds: a queue that is full has room again as soon as one request has ended."""
STATS_SECONDS = 1.0


class Service:
    """Lives in one event loop."""

    def __init__(self, engine: AsyncLLM, config: EngineConfig) -> None:
        self.engine = engine
        self.config = config.server
        self.metrics = ServerMetrics()
        self.name = config.served_name or config.model.rstrip("/").rpartition("/")[2] or config.model
        self.root = config.model
        self.created = int(time.time())
        self.is_draining = False
        self._names = config.model_names | {self.name}
        self._max_num_seqs = config.scheduler.max_num_seqs
        self.num_sequences = 0
        self.max_prompt_chars: int | None = None
        """A text with more characters fits nowhere, whatever it says; None where that isn't known."""
        self._asking: asyncio.Future[dict[str, Any]] | None = None
        self._stats: Mapping[str, Any] | None = None

    async def prepare(self) -> None:
        """Once the engine is ready."""
        tokenizer = self.engine.tokenizer
        if tokenizer is not None:
            most = await self.engine.in_worker(lambda: tokenizer.max_bytes_an_id)
            self.max_prompt_chars = None if most is None else most * self.engine.max_model_len

    # ---- state

    @property
    def status(self) -> str:
        """ok, starting, draining or dead."""
        state = self.engine.state
        if state is EngineState.READY:
            return "draining" if self.is_draining else "ok"
        return str(state)

    def check_ready(self) -> None:
        """Raises ApiError 503 where nothing new is taken."""
        if (status := self.status) != "ok":
            reason = {
                "starting": "the model is being loaded",
                "draining": "the server is shutting down",
            }.get(status, "the engine has failed")
            raise unavailable(reason)

    # ---- the queue

    @property
    def capacity(self) -> int:
        """Sequences that may be there at the same time, running or waiting."""
        return self._max_num_seqs + self.config.max_queue

    def check_room(self, count: int = 1) -> None:
        """Raises ApiError 429 where there is no room for so many more sequences, 400 where there never is."""
        if count > self.capacity:
            raise bad_request(
                "prompt",
                f"{count} sequences (prompts x n) are more than server.max_queue + scheduler.max_num_seqs "
                f"({self.capacity})",
            )
        if self.num_sequences + count > self.capacity:
            self.metrics.reject("queue_full")
            raise ApiError(
                429,
                f"the queue is full (server.max_queue is {self.config.max_queue}); try again later",
                code="queue_full",
                headers={"retry-after": RETRY_AFTER},
            )

    @contextlib.contextmanager
    def room(self, count: int) -> Iterator[None]:
        """Room for so many sequences, as long as the context lasts."""
        self.check_room(count)
        self.num_sequences += count
        try:
            yield
        finally:
            self.num_sequences -= count

    def check_priority(self, priority: int) -> None:
        """Raises ApiError 400 for one that would have no effect."""
        if priority and self.engine.config.scheduler.policy == "fcfs":
            raise bad_request("priority", "has no effect: scheduler.policy is fcfs")

    # ---- names

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request names as its model; None is the base model. The engine knows which there
        are."""
        return None if model is None or model in self._names else model

    # ---- numbers

    async def stats(self) -> Mapping[str, Any] | None:
        """The engine's numbers: of now, or, where a step takes long, the last ones that are known. None while
        there is no engine."""
        if self.engine.state not in (EngineState.READY, EngineState.DRAINING):
            return None
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self.engine.stats())
        try:
            async with asyncio.timeout(STATS_SECONDS):
                self._stats = await asyncio.shield(self._asking)
        except (TimeoutError, EngineUnavailable):
            pass
        return self._stats

    async def metrics_page(self) -> bytes:
        stats, engine = await self.stats(), self.engine
        return self.metrics.render(
            stats,
            None if stats is None else engine.plan,
            max_loras=engine.config.lora.max_loaded,
            step_seconds=engine.step_seconds,
        )
