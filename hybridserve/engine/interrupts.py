"""Ctrl-C, and whatever else a program lets a signal raise, at moments when it does no harm.

Python runs the handlers of signals in the main thread, between any two of its instructions: also between two
that belong together. So an engine keeps its books within `held`, and what may take long (a step of the
model, waiting, a caller's own function) runs within `let_through`. Knows signals; knows no engine.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Handler = Callable[[int, FrameType | None], object]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Those whose handlers are made to raise: of Ctrl-C, of a supervisor and of a timeout. Where a program has
set no handler of its own, there is nothing to hold back."""


class Interrupts:
    """Of one engine, and of the thread that drives it; other threads than the main one have none.

    Blocks may be nested: the innermost one counts. The outermost stands in the place of the program's
    handlers, and puts them back.
    """

    def __init__(self) -> None:
        self._lets_through: list[bool] = []  # of the blocks, the innermost one last
        self._plain: dict[int, Handler] = {}
        self._came: dict[int, None] = {}
        self._raised = 0
        """The signal whose handler raised last."""

    def held(self) -> Block:
        """What comes within is handled when the block ends: KeyboardInterrupt is raised there."""
        return Block(self, lets_through=False)

    def let_through(self) -> Block:
        """Within a block that is `held`: what comes is handled at once; first, what has come before.

        What a handler raises while Python collects something is lost (Python prints it, and goes on). So
        where a block ends as if nothing had been raised in it, the signal is handled again."""
        return Block(self, lets_through=True)

    def _begin(self) -> None:
        self._plain.clear()
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._handle:
                    self._plain[number] = handler
                    signal.signal(number, self._handle)
        except BaseException:  # one signal while another was not yet held
            self._end()
            raise

    def _end(self) -> None:
        for number, handler in self._plain.items():
            signal.signal(number, handler)
        self._deliver()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came[number] = None
        if self._lets_through and self._lets_through[-1]:
            self._deliver()

    def _deliver(self) -> None:
        """Let the program's handlers know. A block that one of them leaves by raising lets nothing more
        through: whoever cleans up is not interrupted again."""
        blocks = self._lets_through
        while self._came:
            number, _ = self._came.popitem()
            if blocks:
                blocks[-1] = False
            self._raised = number
            self._plain[number](number, None)
            if blocks:
                blocks[-1] = True


class Block:
    """A context manager, for one use."""

    def __init__(self, owner: Interrupts, *, lets_through: bool) -> None:
        self._owner = owner
        self._new = lets_through
        self._level = 0

    def __enter__(self) -> Self:
        blocks = self._owner._lets_through
        self._level = len(blocks)
        if not blocks:
            if self._new:  # nothing is held
                self._level = -1
                return self
            self._owner._begin()
        blocks.append(self._new)
        if self._new:
            self._owner._deliver()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._level < 0:
            return
        owner, blocks = self._owner, self._owner._lets_through
        if self._new and kind is None and not blocks[self._level]:  # a handler raised, and nobody noticed
            owner._came[owner._raised] = None
        del blocks[self._level :]  # with those inside that a signal left before they could end
        if self._level == 0:
            owner._end()
        elif blocks[-1]:
            owner._deliver()
