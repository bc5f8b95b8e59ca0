"""Runs the prompts of one HTTP request in the engine and answers it, whole or as server-sent events.

Knows streams of deltas, deadlines, and clients that leave; what an answer looks like is for `completions` and
`chat` to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hybridserve.core.request import FinishReason
from hybridserve.frontend.errors import EngineClosed, EngineDead, EngineUnavailable
from hybridserve.server import tracing
from hybridserve.server.errors import ApiError, from_value_error, internal_error, report, unavailable
from hybridserve.server.limits import ClientDisconnected
from hybridserve.server.sse import EventStream, send_json

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
    from typing import Any

    import msgspec

    from hybridserve.core.request import SamplingParams
    from hybridserve.frontend.streams import RequestStream
    from hybridserve.outputs import Delta, RequestOutput
    from hybridserve.server.exchange import Exchange
    from hybridserve.server.limits import Receive
    from hybridserve.server.service import Service

logger = logging.getLogger(__name__)

LARGE_ANSWER = 64 * 1024
"""Characters from which an answer is made in a worker thread."""
FAREWELL_SECONDS = 5.0
"""For a client to take the last words of a stream that failed."""


@dataclass(slots=True)
class Job:
    """One prompt. `text` is what its client wrote, where that was text."""

    prompt_ids: list[int]
    text: str | None
    params: SamplingParams
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are part of what is generated."""
    num_generated: int = 0
    last_times: dict[int, float] = field(default_factory=dict)
    """Index of a continuation that goes on -> when its last piece came (monotonic seconds)."""
    num_running: int = 0
    """Continuations that have not ended."""
    arrival: float = 0.0
    """When it was submitted (monotonic seconds)."""
    first_time: float | None = None
    """When its first token came."""
    is_taken: bool = False
    """Whether the engine has said that it has it."""
    end: float | None = None
    """When it was over, whatever became of it."""
    is_whole: bool = False
    """Whether the engine brought it to its end."""
    num_cached: int | None = None
    """Tokens of the prompt that had been computed before; None until the end."""


def num_cached(jobs: Sequence[Job]) -> int | None:
    """Of several prompts together; None until all are at their end."""
    counts = [job.num_cached for job in jobs]
    return None if None in counts else sum(count or 0 for count in counts)


class Answer(Protocol):
    """Of one HTTP request, whose continuations are numbered through all of its prompts."""

    def whole(self, jobs: Sequence[Job], outputs: Sequence[RequestOutput]) -> msgspec.Struct:
        """The response."""

    def pieces(self, job_index: int, delta: Delta) -> Iterable[msgspec.Struct]:
        """The events that a delta makes; often one, or none."""

    def last_piece(self) -> msgspec.Struct | None:
        """The event after all others, if there is one."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What is to be done for one HTTP request."""

    jobs: list[Job]
    adapter: str | None
    priority: int
    cache_salt: str | None
    answer: Answer
    is_stream: bool

    async def run(self, service: Service, exchange: Exchange) -> None:
        """Answer, unless the client leaves first: then what was running is aborted."""
        num_sequences = sum(job.params.n for job in self.jobs)
        with service.room(num_sequences):
            try:
                await while_connected(exchange.receive, self._answer(service, exchange))
            finally:
                exchange.notes.append(self._note())

    def _note(self) -> str:
        """For the log."""
        num_prompt = sum(len(job.prompt_ids) for job in self.jobs)
        num_generated = sum(job.num_generated for job in self.jobs)
        cached = num_cached(self.jobs)
        known = "" if cached is None else f" ({cached} cached)"
        return f"{num_prompt} prompt tokens{known}, {num_generated} generated"

    async def _answer(self, service: Service, exchange: Exchange) -> None:
        events = EventStream(exchange.send, exchange.response_headers)
        streams: dict[int, RequestStream] = {}
        deadline = service.config.request_timeout
        ending = "abort"
        try:
            async with asyncio.timeout(deadline):
                await self._submit(service, streams)
                in_order = [streams[index] for index in range(len(self.jobs))]
                if self.is_stream:
                    await self._stream(service, in_order, events)
                else:
                    await self._whole(service, in_order, exchange)
            return
        except TimeoutError:
            message = f"the request took longer than server.request_timeout ({deadline} seconds)"
            error = ApiError(504, message, code="request_timeout", headers={"x-should-retry": "false"})
        except ApiError as failure:
            error, ending = failure, "error" if failure.status >= 500 else "refused"
        except Exception as fault:
            report(fault)
            error, ending = internal_error(), "error"
        finally:
            for stream in streams.values():
                await stream.aclose()
            for job in self.jobs:
                service.metrics.finish_sequences(ending, job.num_running)
                job.end = time.monotonic()
                _count_cut(service, job)
        if not events.has_started:
            raise error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await events.fail(error)

    async def _submit(self, service: Service, streams: dict[int, RequestStream]) -> None:
        """All prompts, or none. A stream is in `streams` from the moment that it is there."""

        async def submit(index: int, job: Job) -> None:
            job.num_running = job.params.n
            job.arrival = time.monotonic()
            streams[index] = await service.engine.submit(
                job.prompt_ids,
                job.params,
                adapter=self.adapter,
                priority=self.priority,
                cache_salt=self.cache_salt,
                shown_ids=job.shown_ids,
                on_taken=partial(_count_taken, service, job),
            )
            if (span := tracing.current.get()) is not None:
                span.start(len(job.prompt_ids), job.params.n, job.params.max_tokens)

        tasks = [asyncio.ensure_future(submit(index, job)) for index, job in enumerate(self.jobs)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        except (ValueError, EngineUnavailable) as error:
            raise _as_api_error(service, error) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # each has said what it had to say

    async def _whole(self, service: Service, streams: list[RequestStream], exchange: Exchange) -> None:
        outputs = [stream.new_output() for stream in streams]
        async with contextlib.aclosing(self._deltas(service, streams)) as steps:
            async for step in steps:
                for index, delta in step:
                    outputs[index].add(delta)
        size = sum(len(part.text) for output in outputs for part in output.outputs)
        if size < LARGE_ANSWER:
            answer = self.answer.whole(self.jobs, outputs)
        else:
            answer = await service.engine.in_worker(self.answer.whole, self.jobs, outputs)
        await send_json(exchange.send, 200, answer, exchange.response_headers)

    async def _stream(self, service: Service, streams: list[RequestStream], events: EventStream) -> None:
        await events.start()
        pieces = self.answer.pieces
        async with contextlib.aclosing(self._deltas(service, streams)) as steps:
            async for step in steps:
                await events.send([piece for index, delta in step for piece in pieces(index, delta)])
        last = self.answer.last_piece()
        await events.end([] if last is None else [last])

    async def _deltas(
        self, service: Service, streams: list[RequestStream]
    ) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """What each step adds, with the index of the prompt. Raises ApiError where the engine gives up."""
        try:
            async for step in _merged(streams):
                now = time.monotonic()
                for index, delta in step:
                    self._count(service, self.jobs[index], delta, now)
                yield step
        except EngineUnavailable as error:
            raise _as_api_error(service, error) from None

    def _count(self, service: Service, job: Job, delta: Delta, now: float) -> None:
        metrics = service.metrics
        if delta.token_ids:
            job.num_generated += len(delta.token_ids)
            if job.first_time is None:
                job.first_time = now
            last = job.last_times.get(delta.index)
            if last is not None:
                metrics.observe_gap(now - last)
            job.last_times[delta.index] = now
        if delta.finish_reason is not None:
            job.last_times.pop(delta.index, None)
            if delta.finish_reason == FinishReason.ABORT:
                metrics.corrupt()
                raise ApiError(
                    500, f"the engine gave the request up: {delta.stop_reason}", code="engine_error"
                )
            job.num_running -= 1
            metrics.finish_sequences(delta.finish_reason, 1)
        if delta.metrics is not None:
            job.is_whole = True
            job.num_cached = delta.metrics.num_cached_tokens
            metrics.finish(delta.metrics, job.num_generated)


def _count_taken(service: Service, job: Job) -> None:
    """The engine has it; the client may have left meanwhile."""
    service.metrics.take(len(job.prompt_ids), job.params.n, job.params.max_tokens)
    job.is_taken = True
    _count_cut(service, job)


def _count_cut(service: Service, job: Job) -> None:
    """Where a prompt is over that the engine took, and of which it never said how it ended."""
    if job.is_taken and job.end is not None and not job.is_whole:
        first = None if job.first_time is None else job.first_time - job.arrival
        service.metrics.cut(job.end - job.arrival, first, job.num_generated)


async def _merged(streams: list[RequestStream]) -> AsyncGenerator[list[tuple[int, Delta]], None]:
    """The deltas of several prompts as they come, all that are there at once."""
    if len(streams) == 1:
        async for deltas in streams[0]:
            yield [(0, delta) for delta in deltas]
        return
    queue: asyncio.Queue[list[tuple[int, Delta]] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for deltas in stream:
                queue.put_nowait([(index, delta) for delta in deltas])
        except Exception as error:  # for whoever reads the queue
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(pumps)
    try:
        while num_open:
            step: list[tuple[int, Delta]] = []
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            for item in items:
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    step += item
            if step:
                yield step
    finally:
        for task in pumps:
            task.cancel()


def _as_api_error(service: Service, error: ValueError | EngineUnavailable) -> ApiError:
    if isinstance(error, EngineClosed):
        return unavailable("the server is being stopped")
    if isinstance(error, EngineDead):
        logger.error("a request was lost: the engine has ended")
        return ApiError(500, "the engine has failed while this was running", code="engine_failed")
    if isinstance(error, EngineUnavailable):
        return unavailable("the server takes no requests now")
    refusal = from_value_error(error)
    if refusal.code != "model_not_found":
        return refusal
    return ApiError(404, f"{refusal}; the base model is {service.name}", param="model", code=refusal.code)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do something until it is done or the client has left: then it is cancelled, and ClientDisconnected
    raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise ClientDisconnected
        await task
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
