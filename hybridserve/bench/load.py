"""Sends conversations at a target: so many at a time, or so many a second.

Knows when to send; neither what is sent nor what is made of the results. Time is the event loop's.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal

from hybridserve.bench.record import Record, measure
from hybridserve.bench.target import Message, TargetRequest, is_chat, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hybridserve.bench.target import Content, Target
    from hybridserve.bench.workloads import Conversation

Arrivals = Literal["poisson", "constant"]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """As many conversations as that at any time: one begins when another ends."""

    concurrency: int

    def describe(self) -> dict[str, Any]:
        return {"kind": "closed", "concurrency": self.concurrency}

    def __str__(self) -> str:
        return f"{self.concurrency} at a time"


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """`rate` conversations a second, however the target fares; the first at once."""

    rate: float
    arrivals: Arrivals
    seed: int

    def gaps(self) -> Iterator[float]:
        """Seconds from each conversation to the next."""
        if self.arrivals == "constant":
            return repeat(1 / self.rate)
        rng = random.Random(f"arrivals {self.seed}")
        return iter(lambda: rng.expovariate(self.rate), None)

    def describe(self) -> dict[str, Any]:
        return {"kind": "open", "rate": self.rate, "arrivals": self.arrivals, "seed": self.seed}

    def __str__(self) -> str:
        return f"{self.rate:g} a second ({self.arrivals})"


@dataclass
class Run:
    """One course of load. `records` grows as requests end; what is still under way when `go` is cancelled
    leaves none.

    timeout: seconds for a request; think: seconds between an answer and the next turn; duration: seconds
    after which no request is sent any more (those under way are waited for).
    """

    target: Target
    timeout: float | None = None
    think: float = 0.0
    duration: float | None = None
    watch: Callable[[Run], None] = lambda _: None
    """Called whenever a request is sent or has ended."""
    records: list[Record] = field(default_factory=list)
    num_running: int = 0
    num_skipped: int = 0
    """Turns that could not be sent, for the one before failed."""
    begin: float = 0.0
    """When `go` was called."""

    async def go(self, conversations: Iterable[Conversation], load: ClosedLoop | OpenLoop) -> None:
        """Returns when all have ended."""
        self.begin = asyncio.get_running_loop().time()
        if isinstance(load, ClosedLoop):
            source = iter(conversations)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(load.concurrency):
                    tasks.create_task(self._work(source))
            return
        due = self.begin
        async with asyncio.TaskGroup() as tasks:
            for conversation, gap in zip(conversations, load.gaps(), strict=False):
                await asyncio.sleep(due - asyncio.get_running_loop().time())
                if self._is_over():
                    break
                tasks.create_task(self._converse(conversation, due))
                due += gap

    async def _work(self, source: Iterator[Conversation]) -> None:
        for conversation in source:
            if self._is_over():
                break
            await self._converse(conversation, asyncio.get_running_loop().time())

    def _is_over(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self.duration is not None and now - self.begin >= self.duration

    async def _converse(self, conversation: Conversation, due: float) -> None:
        """All turns; each prompt is all that was said before, and what is new."""
        history: Content | None = None
        for number, turn in enumerate(conversation.turns):
            if number:
                await asyncio.sleep(self.think)
                due = asyncio.get_running_loop().time()
                if self._is_over():
                    break
            prompt = turn.content if history is None else joined(history, turn.content)
            request = TargetRequest(
                prompt, turn.max_tokens, conversation.adapter, conversation.ignore_eos, conversation.sampling
            )
            self.num_running += 1
            self.watch(self)
            try:
                record = await measure(self.target, request, due=due, limit=self.timeout, turn=number)
            finally:
                self.num_running -= 1
            self.records.append(record)
            self.watch(self)
            if not record.is_ok:
                self.num_skipped += len(conversation.turns) - number - 1
                break
            history = joined(prompt, _answer(prompt, record))


def _answer(prompt: Content, record: Record) -> Content:
    """What a request has brought, in the form of its prompt."""
    text = "".join(record.text)
    if isinstance(prompt, str):
        return text
    if is_chat(prompt):
        answer: list[Message] = [{"role": "assistant", "content": text}]
        return answer
    return record.token_ids
