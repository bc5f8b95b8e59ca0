"""Lets Python's garbage collector rest while modules are loaded.

An import makes hundreds of thousands of objects that all stay, and the collector looks through them again and
again as their number grows: a fifth of the time that importing torch takes. Knows the collector; imports
nothing of weight.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def collector_rests(*, keeps: bool = False) -> Iterator[None]:
    """Where it is on, it is off within. `keeps`: what there is at the end is never looked at again, for a
    program of our own, which has no garbage by then."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if keeps:
            gc.freeze()
        gc.enable()
