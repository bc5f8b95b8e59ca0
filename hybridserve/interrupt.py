"""What Ctrl-C means to the command line while it imports, and while it works; and what being ended means to
work that has something to clean up.

Knows signals. The library does not use it: how a program is interrupted is that program's business
(`engine.interrupts` only chooses the moment).
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from hybridserve.collector import collector_rests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

INTERRUPTED = 130
"""Exit status of a program that SIGINT ended, as shells report it."""


class _Raise:
    """Raises KeyboardInterrupt, and remembers it."""

    has_raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.has_raised = True
        signal.default_int_handler(number, frame)


@contextlib.contextmanager
def interrupt_exits_at_once() -> Iterator[None]:
    """For imports, which leave nothing to clean up: a class body or an extension module that is interrupted
    while it is loaded makes any other error of KeyboardInterrupt, or none. Nor is there garbage."""
    current = signal.getsignal(signal.SIGINT)
    with collector_rests(keeps=True):
        if current is not signal.default_int_handler and not isinstance(current, _Raise):  # somebody else's
            yield
            return
        with interrupt_calls(lambda *_: os._exit(INTERRUPTED)):
            yield


@contextlib.contextmanager
def interrupt_calls(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Ctrl-C calls this function; in a thread that may not say so, nothing changes."""
    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:  # only the main thread may
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupt_prevails() -> Iterator[None]:
    """For work that cleans up when KeyboardInterrupt ends it: whatever else that became on its way (what is
    imported late makes another error of it, or none), KeyboardInterrupt is what comes out."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    handler = _Raise()
    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:  # only the main thread may
        yield
        return
    try:
        yield
    except Exception:
        if not handler.has_raised:
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if handler.has_raised:
        raise KeyboardInterrupt


class _Exit:
    """Raises SystemExit with the status that shells report, once, and remembers it."""

    status = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.status:  # cleaning up is not interrupted
            self.status = 128 + number
            raise SystemExit(self.status)


@contextlib.contextmanager
def ending_unwinds() -> Iterator[None]:
    """For work that leaves something behind if SIGTERM or SIGHUP just ends it: they are raised as SystemExit,
    which is what comes out, as `interrupt_prevails` has it of KeyboardInterrupt."""
    handler = _Exit()
    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # else it is ignored, or somebody else's
                before[number] = signal.signal(number, handler)
    except ValueError:  # only the main thread may
        yield
        return
    try:
        yield
    except Exception:
        if not handler.status:
            raise
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
    if handler.status:
        raise SystemExit(handler.status)
