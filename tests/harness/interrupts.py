"""SIGINT at a chosen point of a program, and at a random time."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextmanager
def lost_in_collection() -> Iterator[None]:
    """An interrupt that comes while something is collected is lost, as Python's documents say. pytest would
    keep it until the test's end, with all that its frames refer to: a stream that nobody has any more."""
    plain = sys.unraisablehook

    def forget(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            plain(unraisable)

    sys.unraisablehook = forget
    try:
        yield
    finally:
        sys.unraisablehook = plain


class InterruptAt:
    """Sends SIGINT at the `number`th call, or return from one, that the functions of some files make or are
    subject to. KeyboardInterrupt ends the block, if it is raised in there.

    Python handles signals between the same instructions; this visits them one by one, where time would choose
    those that take long.
    """

    def __init__(self, number: int, files: str) -> None:
        self.number = number
        self.count = 0
        self.has_raised = False
        self._files = re.compile(files)
        self._matches: dict[str, bool] = {}

    def __enter__(self) -> Self:
        sys.setprofile(self._event)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.setprofile(None)
        self.has_raised = kind is KeyboardInterrupt
        return self.has_raised

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        matches = self._matches.get(file)
        if matches is None:
            matches = self._matches[file] = bool(self._files.search(file))
        if matches:
            self.count += 1
            if self.count == self.number:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)


class Interrupter:
    """Sends SIGINT to this process from another thread; only within `after` is it raised."""

    def __init__(self) -> None:
        self.num_raised = 0
        self._armed = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        assert signal.getsignal(signal.SIGINT) == self._handle
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            self.num_raised += 1
            raise KeyboardInterrupt

    @contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        """Interrupts the block, unless it has ended by then. What is raised stays inside."""
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            self._armed = True
            yield
            self._armed = False
        except KeyboardInterrupt:
            pass
        timer.cancel()
        timer.join()
