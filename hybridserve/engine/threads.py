"""How many threads an engine on a CPU takes: as many as this process has cores for.

Threads of a kernel wait for each other, so one without a core of its own makes all of them slow. A process's
affinity says which cores there are; a container's quota says for how much of the time, which neither torch
nor OpenMP asks. What other processes leave of the cores changes while an engine runs: `thread_governor.py`.
Knows the system's files; knows no engine.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

VARIABLE = "OMP_NUM_THREADS"
"""Who sets it has said how many threads there are to be."""


@dataclass(frozen=True, slots=True)
class Cores:
    """`num` that this process can keep busy, and what says so."""

    num: int
    reason: str


def usable_cores(proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup")) -> Cores:
    """By affinity, or by the tightest quota of the control groups, of version 1 or 2, that it is in."""
    num = len(psutil.Process().cpu_affinity() or [1])
    quota = min((cores for _, cores in limited_groups(proc, cgroups)), default=math.inf)
    if quota >= num:
        return Cores(num, f"of {num} {'core' if num == 1 else 'cores'}")
    return Cores(max(1, math.ceil(quota)), f"of {num} cores, for a quota of {quota:.3g}")


def limit_threads() -> str:
    """Have torch use no more threads than there are cores for, unless the user has said how many; how many
    there are now, for whoever asks. Of all that runs in this process: OpenMP has one pool."""
    import torch

    now = torch.get_num_threads()
    if VARIABLE in os.environ:
        return f"{now} threads ({VARIABLE})"
    cores = usable_cores()
    if cores.num < now:
        torch.set_num_threads(cores.num)
    return f"{torch.get_num_threads()} threads ({cores.reason})"


def limited_groups(proc: Path, cgroups: Path) -> list[tuple[Path, float]]:
    """The folder, and cores' worth of time, of each group from this process's up that has a limit."""
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            if (quota := _quota(folder, is_old=bool(controllers))) is not None:
                found.append((folder, quota))
    return found


def _quota(folder: Path, *, is_old: bool) -> float | None:
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_old else ("cpu.max",)
    try:
        quota, period = " ".join((folder / name).read_text().strip() for name in names).split()
        cores = float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max": no limit; -1 in version 1
        return None
    return cores if cores > 0 else None
