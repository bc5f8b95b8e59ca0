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
from collections.abc import Callable
from typing import Any, TypeVar, Union

T = TypeVar("T")

Outcome = Union[T, Exception]  # noqa: UP007 - a generic alias
"""What `work` returned, or what it raised."""

_Job = tuple[Callable[[], Any], Callable[[Any], None]]

NICENESS = 5
"""Of the thread, where the system has such a thing for threads: a step in progress goes before a load."""

LEISURE = 2.0
"""While steps run, seconds that are left to them for each second of work. The threads of a process run Python
one at a time, whatever their niceness: without it a step would wait for every turn of the loader's."""

MAX_PAUSE = 0.1  # seconds


def no_pause() -> None:
    """For work that nobody's steps run beside."""


class Loader:
    """Runs one piece of work at a time, in the order in which they came."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._news = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_pending = 0
        self._closed = False
        self._resumed = 0.0
        self.steps_run = False
        """Whether there are steps that work should leave time to; set by the engine's thread."""

    @property
    def num_pending(self) -> int:
        """Pieces of work that were submitted and whose `then` has not run."""
        return self._num_pending

    def submit(self, work: Callable[[], T], then: Callable[[Outcome[T]], None]) -> None:
        """Run `work` on the loader's thread, then `then` with its outcome on the thread that calls `poll`."""
        if self._closed:
            raise RuntimeError("the loader of adapters has been closed")
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs, self._done, self._news), name=self._name, daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._num_pending += 1
        self._jobs.put((work, then))

    def pause(self) -> None:
        """Called by `work`, on the loader's thread, between short pieces: leaves time to steps if any run."""
        if self.steps_run and self._resumed:
            worked = time.thread_time() - self._resumed
            time.sleep(max(0.0, min(LEISURE * worked, MAX_PAUSE)))
        self._resumed = time.thread_time()

    def poll(self) -> None:
        """Run `then` of all work that is done. One that raises, or is interrupted, runs again next time."""
        if not self._num_pending:
            return
        self._news.clear()
        while self._done:
            then, outcome = self._done[0]
            then(outcome)
            self._done.popleft()
            self._num_pending -= 1

    def wait(self, timeout: float) -> None:
        """Return when `poll` would have something to do, or after `timeout` seconds."""
        if self._num_pending and not self._done:
            self._news.wait(timeout)

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
        self._done.clear()
        self._num_pending = 0


def _serve(
    jobs: queue.SimpleQueue[_Job | None],
    done: deque[tuple[Callable[[Any], None], Any]],
    news: threading.Event,
) -> None:
    """The thread. It holds no reference to its loader, so that a forgotten one can be collected."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    while (job := jobs.get()) is not None:
        work, then = job
        try:
            outcome = work()
        except Exception as error:
            outcome = error
        except BaseException as error:  # a thread that ended here would leave its engine waiting for ever
            outcome = RuntimeError(f"loading was broken off: {type(error).__name__}")
        done.append((then, outcome))
        news.set()
        del job, work, then, outcome  # nothing is kept alive while waiting
