"""Work that must not hold up the engine's loop: a queue, one thread, and results that wait to be taken in.

Knows functions; does not know what they do. Two threads meet here and nowhere else: the loader's runs `work`,
the engine's submits and, between two steps, runs `then`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, Union

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

Outcome = Union[T, Exception]  # noqa: UP007 - a generic alias
"""What `work` returned, or what it raised."""

NICENESS = 5
"""Of the thread, where the system has such a thing for threads: a step in progress goes before a load."""

LEISURE = 2.0
"""While steps run, seconds that are left to them for each second of work. The threads of a process run Python
one at a time, whatever their niceness: without it a step would wait for every turn of the loader's."""

MAX_PAUSE = 0.1  # seconds


def no_pause() -> None:
    """For work that nobody's steps run beside."""


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any] | None
    """None when it is done: nothing that it holds is kept alive for longer than it takes."""
    then: Callable[[Any], None]
    outcome: Any = None


class Loader:
    """Runs one piece of work at a time, in the order in which they came."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending: deque[_Job] = deque()
        # Wakes who waits. Unlike a threading.Event it can't be left locked by a thread that is interrupted.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._resumed = 0.0
        self._busy_until = 0.0

    @property
    def num_pending(self) -> int:
        """Pieces of work that were submitted and whose `then` has not run."""
        return len(self._pending)

    def submit(self, work: Callable[[], T], then: Callable[[Outcome[T]], None]) -> None:
        """Run `work` on the loader's thread, then `then` with its outcome on the thread that calls `poll`."""
        if self._closed:
            raise RuntimeError("the loader of adapters has been closed")
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs, self._news), name=self._name, daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        job = _Job(work, then)
        self._jobs.put(job)
        self._pending.append(job)

    def leave_time(self, seconds: float) -> None:
        """From now on steps run, for so long; 0: they don't."""
        self._busy_until = time.monotonic() + seconds

    def pause(self) -> None:
        """Called by `work`, on the loader's thread, between short pieces: leaves time to steps if any run."""
        if self._resumed and time.monotonic() < self._busy_until:
            worked = time.thread_time() - self._resumed
            time.sleep(max(0.0, min(LEISURE * worked, MAX_PAUSE)))
        self._resumed = time.thread_time()

    def poll(self) -> None:
        """Run `then` of all work that is done. One that raises, or is interrupted, runs again next time."""
        if not self._pending:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                self._news.get_nowait()
        while self._pending and (job := self._pending[0]).work is None:
            job.then(job.outcome)
            self._pending.popleft()

    def wait(self, timeout: float) -> None:
        """Return when `poll` would have something to do, or after `timeout` seconds."""
        if self._pending and self._pending[0].work is not None:
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=timeout)

    def close(self) -> None:
        """End the thread after the work in hand; what has not been started, and all outcomes, are dropped."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        self._pending.clear()


def _serve(
    jobs: queue.SimpleQueue[_Job | None],
    news: queue.SimpleQueue[None],
) -> None:
    """The thread. It holds no reference to its loader, so that a forgotten one can be collected."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    while (job := jobs.get()) is not None:
        assert job.work is not None
        try:
            job.outcome = job.work()
        except Exception as error:
            job.outcome = error
        except BaseException as error:  # a thread that ended here would leave its engine waiting for ever
            job.outcome = RuntimeError(f"loading was broken off: {type(error).__name__}")
        job.work = None  # now it is done
        news.put(None)
        del job  # nothing is kept alive while waiting
