"""What tests ask of processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only what is left of one until its parent asks."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


LONGEST_LOOK = 0.1
"""Seconds that one look counts for: one that takes longer says that the machine is busy."""


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether the condition became true in time. Time in which a busy machine did not let this thread look
    does not count, up to ten times as much."""
    begin = last = time.monotonic()
    waited = 0.0
    while not condition():
        if waited > seconds or last - begin > 10 * seconds:
            return False
        time.sleep(0.01)
        now = time.monotonic()
        waited += min(now - last, LONGEST_LOOK)
        last = now
    return True


def end(pid: int) -> None:
    """For the clean-up of a test that failed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
