"""Takes fewer threads while other processes keep cores busy, and more again when they no longer do.

Threads of a kernel wait for each other in every call. Where one of them waits for a core, all the others do
nothing, and a few calls of one step find that again and again: two threads beside one busy process are many
times slower than one. Linux tells how long each thread could have run and had no core.

Knows the system's files and torch's number of threads; knows no engine. What it can't see are cores that a
hypervisor gives to others, and processes that wait as politely as this one would. Between two looks lie as
many milliseconds as a look takes microseconds, and a tenth of a second at least.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from hybridserve.engine.threads import VARIABLE, limited_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

T = TypeVar("T")

logger = logging.getLogger("hybridserve")

PERIOD = 0.1
"""Seconds between two looks, at least."""
WORTH = 1000
"""How many times as long as a look takes is waited for the next."""
SIZABLE = 0.25
"""Seconds a second, of all threads together, that they may wait for cores."""
BURST = 0.15
"""Seconds that they must have been waiting so long before there are fewer: shorter ones are over by then."""
SPARE = 0.75
"""Of a core that has to be idle, of those that this process leaves, for one more thread."""
WINDOW = 1.0
"""Seconds over which that is looked at."""
SHORTEST, LONGEST = 1.0, 60.0
"""Seconds until more threads are tried again: doubled whenever that was soon found to be wrong. After the
longest it is tried whatever the cores seem to do, which a container may show of another machine."""
TRIAL = 10.0
"""Seconds in which more threads prove right."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Counted up from the first one. Seconds of all threads, or of all cores, together."""

    at: float
    """Monotonic."""
    waited: float
    """That threads of this process could have run, and had no core."""
    ran: float
    idle: float | None = None
    """Of the cores that this process may use; None: not looked at, or not told."""
    num_throttled: int = 0
    """Periods at whose end a quota of this process was used up: then all its threads wait alike, and fewer
    would gain nothing."""


class Decision:
    """How many threads there should be, from readings alone."""

    def __init__(self, most: int) -> None:
        self.num = self.most = most
        self._last: Reading | None = None
        self._window: Reading | None = None
        self._waiting_since: float | None = None
        self._patience = SHORTEST
        self._changed = -LONGEST
        self._raised = -LONGEST

    def look(self, now: Reading) -> int:
        """The number from now on. Only readings of the same kind are compared: with `idle` or without."""
        last, self._last = self._last, now
        if last is None or now.num_throttled != last.num_throttled:
            self._waiting_since = self._window = None
            return self.num
        waited = (now.waited - last.waited) / (now.at - last.at)
        if waited < SIZABLE:
            self._waiting_since = None
            if self.num < self.most:
                self._try_more(now)
            return self.num
        self._window = None
        if self._waiting_since is None:
            self._waiting_since = last.at
        if now.at - self._waiting_since >= BURST and self.num > 1:
            is_wrong = now.at - self._raised < TRIAL
            self._patience = min(2 * self._patience, LONGEST) if is_wrong else SHORTEST
            self._change(self.num - max(1, int(waited)), now)
        return self.num

    def _try_more(self, now: Reading) -> None:
        window = self._window
        if window is None or (window.idle is None) != (now.idle is None):
            self._window = now
            return
        if (seconds := now.at - window.at) < WINDOW:
            return
        self._window = now
        half = (self.most - self.num + 1) // 2
        more, quiet = half, now.at - self._changed
        if window.idle is not None and now.idle is not None:
            spare = (now.idle - window.idle + now.ran - window.ran) / seconds - self.num
            more = int(spare + 1 - SPARE)
        if self._raised == self._changed and quiet >= TRIAL:
            self._patience = SHORTEST
        if quiet >= LONGEST or (more >= 1 and quiet >= self._patience):
            self._raised = now.at
            self._change(self.num + (more if more >= 1 else half), now)

    def _change(self, num: int, now: Reading) -> None:
        self.num = min(max(num, 1), self.most)
        self._changed = now.at
        self._waiting_since = self._window = None


class WaitCounters:
    """What Linux says of this process's threads and of the cores that it may use."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
        cores: Collection[int] | None = None,
    ) -> None:
        self._tasks = proc / "self" / "task"
        self._stat = proc / "stat"
        self._groups = [folder / "cpu.stat" for folder, _ in limited_groups(proc / "self", cgroups)]
        self._cores = frozenset(os.sched_getaffinity(0) if cores is None else cores)
        self._known: dict[str, tuple[int, int]] = {}
        """By thread, nanoseconds: that it ran, and waited."""
        self._ran = self._waited = 0

    @property
    def are_told(self) -> bool:
        """Whether this system has them: one without says that nothing has ever run."""
        return any(ran for ran, _ in self._look().values())

    def read(self, at: float, *, with_idle: bool) -> Reading:
        """`at`: the time, monotonic seconds."""
        known = self._look()
        for task, (ran, waited) in known.items():
            ran_before, waited_before = self._known.get(task, (0, 0))
            self._ran += max(0, ran - ran_before)
            self._waited += max(0, waited - waited_before)
        self._known = known
        idle = self._idle() if with_idle else None
        return Reading(at, self._waited / 1e9, self._ran / 1e9, idle, sum(map(_num_throttled, self._groups)))

    def _look(self) -> dict[str, tuple[int, int]]:
        found = {}
        try:
            tasks = os.listdir(self._tasks)  # noqa: PTH208 - a third of what iterdir takes
        except OSError:
            return {}
        for task in tasks:
            try:
                ran, waited, _ = _content(f"{self._tasks}/{task}/schedstat").split()
                found[task] = int(ran), int(waited)
            except (OSError, ValueError):  # it has ended, or the system does not tell
                continue
        return found

    def _idle(self) -> float | None:
        ticks = []
        try:
            for line in _content(f"{self._stat}").splitlines():
                name, *numbers = line.split()
                if not name.startswith(b"cpu"):
                    break
                if name != b"cpu" and int(name[3:]) in self._cores:
                    ticks.append(int(numbers[3]) + int(numbers[4]))  # nothing to do, or waiting for a disk
        except (OSError, ValueError, IndexError):
            return None
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if len(ticks) == len(self._cores) else None


def govern_threads() -> ThreadGovernor | None:
    """For the engine that this thread runs; None where there is one thread, the user has said how many there
    are to be, or the system does not tell."""
    if VARIABLE in os.environ or torch.get_num_threads() == 1:
        return None
    counters = WaitCounters()
    return ThreadGovernor(counters) if counters.are_told else None


class ThreadGovernor:
    """Runs steps with as many of torch's threads as get cores. In between there are as many as the user has
    set: where that becomes another number, it holds, and nothing is changed any more."""

    def __init__(self, counters: WaitCounters) -> None:
        self._counters = counters
        self._decision = Decision(torch.get_num_threads())
        self._next = time.monotonic() + PERIOD
        self._decision.look(counters.read(self._next - PERIOD, with_idle=False))
        self._is_over = False
        self._was_told = False

    @property
    def num_threads(self) -> int:
        """That the next step is run with."""
        return torch.get_num_threads() if self._is_over else self._decision.num

    def run(self, step: Callable[[], T]) -> T:
        """What `step` returns; this thread's number is what it was again."""
        most, num = self._decision.most, self._decision.num
        self._is_over = self._is_over or torch.get_num_threads() != most
        if self._is_over:
            return step()
        if num < most:
            torch.set_num_threads(num)
        try:
            result = step()
        finally:
            if num < most:
                torch.set_num_threads(most)
        self._look()
        return result

    def _look(self) -> None:
        begin = time.monotonic()
        if begin < self._next:
            return
        decision, before = self._decision, self._decision.num
        if decision.look(self._counters.read(begin, with_idle=before < decision.most)) != before:
            self._tell(decision.num, before)
        end = time.monotonic()
        self._next = end + max(PERIOD, WORTH * (end - begin))

    def _tell(self, num: int, before: int) -> None:
        if not self._was_told:
            self._was_told = True
            # A warning, so that it is seen where no logging is set up, as in a server's engine.
            logger.warning(
                "other processes keep cores busy: kernels take %d of %d threads until they no longer do "
                "(told once; the gauge num_threads has the number of each moment)",
                *(num, self._decision.most),
            )
        logger.debug("kernels take %d threads instead of %d", num, before)


def _num_throttled(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("nr_throttled "))


def _content(path: str) -> bytes:
    """Of a file of the system's: small, and without what `open` does for others."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16)
    finally:
        os.close(file)
