"""A thread that does one piece of work after the other, for whoever can't afford to be stuck in one.

Knows functions; does not know what they do.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class JobThread:
    """Unlike an executor of `concurrent.futures` it does not hold up the interpreter's exit, and `abandon`
    ends the waiting for work that may never end."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._pending: set[Future[Any]] = set()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._error is not None:
                future.set_exception(self._error)
                return future
            self._pending.add(future)
        self._jobs.put((work, future))
        return future

    def abandon(self, error: BaseException) -> None:
        """Let all work that is not done, now and later, fail with `error`."""
        with self._lock:
            self._error = error
            pending, self._pending = self._pending, set()
        for future in pending:
            with suppress(InvalidStateError):  # done, or cancelled, this moment
                future.set_exception(error)

    def close(self, seconds: float) -> None:
        """Do what was submitted, for so long at most, and end."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            with self._lock:
                wanted = self._error is None and future.set_running_or_notify_cancel()
            if wanted:
                _do(work, future)
            with self._lock:
                self._pending.discard(future)
            del job, work, future  # nothing is kept alive while waiting


def _do(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = work()
    except BaseException as error:
        with suppress(InvalidStateError):  # abandoned meanwhile
            future.set_exception(error)
    else:
        with suppress(InvalidStateError):
            future.set_result(result)
