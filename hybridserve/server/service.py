"""What the routes of one server share: the engine, who may still come in, names of models, metrics.

Knows whether the server takes requests; knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hybridserve.frontend.errors import EngineClosed, EngineState, EngineUnavailable
from hybridserve.server.errors import ApiError, bad_request, unavailable
from hybridserve.server.metrics import ServerMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping

    from hybridserve.config.schema import EngineConfig
    from hybridserve.engine.messages import EngineView
    from hybridserve.frontend.async_engine import AsyncLLM
    from hybridserve.server.tracing import Tracing

logger = logging.getLogger(__name__)

MAX_WARNINGS = 64
RETRY_AFTER = "1"
"""Seconds: a queue that is full has room again as soon as one request has ended."""
STATS_SECONDS = 1.0
VIEW_SECONDS = 0.4

T = TypeVar("T")


class Latest(Generic[T]):
    """What the engine answered last. Whoever comes while it is being asked waits with the others; one who
    comes within `keep_seconds` of an answer gets that."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], keep_seconds: float = 0.0) -> None:
        self._ask = ask
        self._keep_seconds = keep_seconds
        self._asking: asyncio.Future[T] | None = None
        self._answer: T | None = None
        self._until = 0.0

    async def get(self) -> T | None:
        """The answer; where it takes long, the one before it, if there is one."""
        if time.monotonic() < self._until:
            return self._answer
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        try:
            async with asyncio.timeout(STATS_SECONDS):
                self._answer = await asyncio.shield(self._asking)
            self._until = time.monotonic() + self._keep_seconds
        except (TimeoutError, EngineUnavailable):
            pass
        return self._answer


class Service:
    """Lives in one event loop."""

    def __init__(self, engine: AsyncLLM, config: EngineConfig, spans: Tracing | None = None) -> None:
        self.engine = engine
        self.config = config.server
        self.metrics = ServerMetrics()
        self.spans = spans
        self.name = config.served_name or config.model.rstrip("/").rpartition("/")[2] or config.model
        self.root = config.model
        self.created = int(time.time())
        self.is_draining = False
        self._names = config.model_names | {self.name}
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._unknown_fields: set[str] = set()
        """Those that the log has."""
        self.num_sequences = 0
        self.max_prompt_chars: int | None = None
        """A text with more characters fits nowhere, whatever it says; None where that isn't known."""
        self._stats: Latest[dict[str, Any]] = Latest(engine.stats)
        self._view: Latest[tuple[float, EngineView]] = Latest(self._look, VIEW_SECONDS)

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
        if isinstance(self.engine.error, EngineClosed):  # as the last thing that a server does
            return "draining"
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

    def warn_unknown_fields(self, names: Iterable[str]) -> None:
        """Each is in the log once, and there are so many at most."""
        for name in names:
            if name not in self._unknown_fields and len(self._unknown_fields) < MAX_WARNINGS:
                self._unknown_fields.add(name)
                logger.warning(
                    "the field %s of a request is not known and has no effect (this is said once; "
                    "server.unknown_fields is warn)",
                    name,
                )

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request names as its model; None is the base model. The engine knows which there
        are."""
        return None if model is None or model in self._names else model

    # ---- numbers

    async def stats(self) -> Mapping[str, Any] | None:
        """The engine's numbers: of now, or, where a step takes long, the last ones that are known. None while
        there is no engine."""
        return await self._stats.get() if self._can_answer else None

    async def view(self) -> tuple[float, EngineView] | None:
        """What a watcher sees of the engine, and when that was (monotonic seconds); as `stats`. However many
        watch, the engine is asked a few times a second at most."""
        return await self._view.get() if self._can_answer else None

    @property
    def _can_answer(self) -> bool:
        return self.engine.state in (EngineState.READY, EngineState.DRAINING)

    async def _look(self) -> tuple[float, EngineView]:
        view = await self.engine.view()
        return time.monotonic(), view

    async def metrics_page(self) -> bytes:
        stats, engine = await self.stats(), self.engine
        return self.metrics.render(
            stats,
            None if stats is None else engine.plan,
            max_loras=engine.config.lora.max_loaded,
            step_seconds=engine.step_seconds,
            gauges={
                "ready": self.status == "ok",
                "start_time_seconds": self.created,
                "server_sequences": self.num_sequences,
                "server_sequences_max": self.capacity,
            },
            startup=dict(engine.phases),
        )
