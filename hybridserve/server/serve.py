"""`hybridserve serve`: the life of the server's process, from its first line in the log to its exit status.

Knows signals, sockets and when to end. Imports no torch: the model is in the engine's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from hybridserve.frontend.async_engine import AsyncLLM
from hybridserve.frontend.errors import EngineDead
from hybridserve.server.app import create_app
from hybridserve.server.http11 import bounded_protocol
from hybridserve.server.logs import phase
from hybridserve.server.security import check_exposure
from hybridserve.server.service import Service
from hybridserve.server.tracing import Tracing
from hybridserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.config.schema import EngineConfig, ServerConfig

logger = logging.getLogger(__name__)

FAILED = 1
KEEP_ALIVE_SECONDS = 75
"""Longer than the minute for which load balancers keep an idle connection, so that they close it."""
FAREWELL_SECONDS = 5
"""For responses to be written to the end when there is nothing more to come."""
LINGER_SECONDS = 2.0
"""After the engine's death, so that probes and balancers see 503 rather than a refused connection."""
SLOW_PHASE_SECONDS = 1.0
STILL_SLOW_SECONDS = 3.0
VERY_SLOW_SECONDS = 30.0
"""What takes so long says so no more often than this."""
PLAN_ROWS = ("weights", "arena", "fits", "limits")
"""Of the plan, in a log that is not verbose."""


def serve(config: EngineConfig) -> int:
    """Serve until a signal or the engine's death; returns the exit status.

    Raises ValueError for a configuration that can't be served, OSError where the address can't be had.
    """
    check_exposure(config.server)
    spans = Tracing.from_environment() if config.server.tracing else None
    _allow_many_connections()
    try:
        with (
            contextlib.closing(_listen(config.server)) as listener,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(_Serving(config, listener, spans).run())
    finally:
        if spans is not None:
            spans.close()


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host.strip("[]"), config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ValueError(f"server.host, server.port: {config.host}:{config.port}: {reason}") from None
    return listener


def _allow_many_connections() -> None:
    """Each takes a file descriptor, and the usual limit is below the default queue."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for `_Serving`."""
        yield


class _Serving:
    def __init__(self, config: EngineConfig, listener: socket.socket, spans: Tracing | None) -> None:
        self._config = config
        self._listener = listener
        self._engine = AsyncLLM(config=config)
        self._service = Service(self._engine, config, spans)
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._death: asyncio.Future[EngineDead]
        self._begin = time.monotonic()
        self._slow: dict[str, asyncio.TimerHandle] = {}
        """Of each part of starting up that has begun: what says that it takes long."""

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._death = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        server = _Server(self._uvicorn_config())
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        try:
            return await self._until_end(serving)
        finally:
            await self._engine.close()
            server.should_exit = True
            await serving
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _uvicorn_config(self) -> uvicorn.Config:
        limits = self._config.server.limits
        return uvicorn.Config(
            create_app(self._service),
            http=bounded_protocol(limits.header_bytes, limits.body_bytes),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.header_bytes,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FAREWELL_SECONDS,
        )

    async def _until_end(self, serving: asyncio.Task[None]) -> int:
        signalled = asyncio.ensure_future(self._signals.get())
        loading = asyncio.ensure_future(self._load())
        try:
            done = await _first(signalled, loading, serving)
            if loading in done:
                try:
                    await loading
                except EngineDead as error:
                    self._log_death("the engine did not start", error)
                    return FAILED
                done = await _first(signalled, self._death, serving)
            if signalled in done:
                return await self._stop(signalled.result(), loading.done())
            if self._death in done:
                self._log_death("the engine has died", self._death.result())
                await asyncio.wait({signalled}, timeout=LINGER_SECONDS)
            else:
                logger.error("the HTTP server has ended")
            return FAILED
        finally:
            for waiting in self._slow.values():
                waiting.cancel()
            signalled.cancel()
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    # ---- start

    async def _load(self) -> None:
        config = self._config
        logger.info("hybridserve %s loads %s; listening at %s", __version__, config.model, self.url)
        if not config.server.api_keys:
            logger.info("no key is asked for: server.api_keys is empty")
        self._engine.on_death(self._set_death)
        await self._engine.start(on_phase=self._show_phase)
        await self._engine.wait_ready()
        with phase("server"):
            await self._service.prepare()
        self._log_plan(self._engine.plan_table)
        seconds = time.monotonic() - self._begin
        logger.info("ready in %.1f s: %s serves %s", seconds, self.url, self._service.name)

    def _log_plan(self, table: str) -> None:
        """Its totals; all of it where the log is verbose. `hybridserve plan` shows it, too."""
        lines = table.splitlines()
        if not logger.isEnabledFor(logging.DEBUG):
            lines = [line for line in lines if line.partition(" ")[0] in PLAN_ROWS]
        logger.info("the plan\n%s", "\n".join(f"    {line}" for line in lines))

    def _set_death(self, error: EngineDead) -> None:
        if not self._death.done():
            self._death.set_result(error)

    def _show_phase(self, name: str, seconds: float | None) -> None:
        """Some parts of starting up run beside each other."""
        if (waiting := self._slow.pop(name, None)) is not None:
            waiting.cancel()
        if seconds is None:
            loop = asyncio.get_running_loop()
            self._slow[name] = loop.call_later(SLOW_PHASE_SECONDS, self._show_slow, name, loop.time())
        else:
            logger.info("%s: %.2f s", name, seconds)

    def _show_slow(self, name: str, begin: float) -> None:
        """That something takes long, and now and again that it still does."""
        loop = asyncio.get_running_loop()
        seconds = loop.time() - begin
        logger.info("%s: %.0f s so far", name, seconds)
        pause = STILL_SLOW_SECONDS if seconds < VERY_SLOW_SECONDS else VERY_SLOW_SECONDS
        self._slow[name] = loop.call_later(pause, self._show_slow, name, begin)

    # ---- end

    async def _stop(self, number: signal.Signals, is_ready: bool) -> int:
        """Let what runs finish; a second signal, or the end of the time for it, cuts it short."""
        self._service.is_draining = True
        if not is_ready:
            logger.info("%s while loading: stopping", number.name)
            return _status(number)
        seconds = self._config.server.drain_seconds
        logger.info(
            "%s: %d requests have %g s to finish; again to stop at once",
            number.name,
            self._engine.num_in_flight,
            seconds,
        )
        draining = asyncio.ensure_future(self._engine.drain(seconds))
        again = asyncio.ensure_future(self._signals.get())
        done = await _first(draining, again, self._death)
        for task in (draining, again):
            task.cancel()
        await asyncio.gather(draining, again, return_exceptions=True)
        if again in done:
            logger.warning("%s again: %d requests are cut short", number.name, self._engine.num_in_flight)
            return 128 + number
        if self._death in done:
            self._log_death("the engine has died", self._death.result())
            return FAILED
        if not draining.result():
            logger.warning("%d requests have not finished and are cut short", self._engine.num_in_flight)
        logger.info("stopped")
        return _status(number)

    def _log_death(self, what: str, error: EngineDead) -> None:
        if error.details:
            logger.debug("in the engine's process:\n%s", error.details)
        logger.error("%s%s: %s", what, " (--verbose shows where)" if error.details else "", error)


async def _first(*futures: asyncio.Future[Any]) -> set[asyncio.Future[Any]]:
    """Those that are done when one is."""
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    return done


def _status(number: signal.Signals) -> int:
    """A supervisor asks with SIGTERM, and has got what it asked for."""
    return 0 if number is signal.SIGTERM else 128 + number
