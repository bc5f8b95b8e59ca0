"""What Ctrl-C means to the command line while it imports.

Knows signals. The library does not use it: how a program is interrupted is that program's business.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERRUPTED = 130
"""Exit status of a program that SIGINT ended, as shells report it."""


@contextlib.contextmanager
def interrupt_exits_at_once() -> Iterator[None]:
    """For imports, which leave nothing to clean up: a class body or an extension module that is interrupted
    while it is loaded makes any other error of KeyboardInterrupt, or none."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    try:
        before = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    except ValueError:  # only the main thread may
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
