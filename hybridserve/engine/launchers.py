"""How the ranks other than 0 come to life, are watched and end.

Knows processes; does not know what ranks do. Nothing but their start passes through here: steps and requests
never do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from hybridserve.distributed.process_group import connect_store, open_store, prefixed
from hybridserve.engine.threads import VARIABLE, usable_cores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hybridserve.distributed.process_group import Store

POLL_SECONDS = 0.02


class Launcher(ABC):
    """Starts ranks 1 .. of one engine. Used by one thread, which lives as long as they do."""

    can_restart = False
    """Whether fresh ranks may be started when some have failed."""

    @abstractmethod
    def open_store(self, address: str) -> Store:
        """Where they will meet, for rank 0."""

    @abstractmethod
    def connect_store(self) -> Store:
        """One more connection to it."""

    @abstractmethod
    def start(self, num_ranks: int) -> None:
        """Start those that don't run already."""

    @abstractmethod
    def ended(self) -> Mapping[int, str]:
        """Ranks that have ended without being stopped, and how."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Until all have ended, or for so long."""

    @abstractmethod
    def stop(self) -> None:
        """End those that have not, by force. Nothing is left of them."""

    @property
    @abstractmethod
    def num_local_ranks(self) -> int:
        """Ranks on this machine, rank 0 included: they share its cores."""

    def describe(self, rank: int) -> str:
        return f"rank {rank}"


class ProcessLauncher(Launcher):
    """`parallel.executor: mp`: child processes of this one.

    Each is a fresh interpreter that runs `command` with the number of its rank and the place of the store, so
    neither the caller's `__main__` nor anything pickled is run again. They end with this process, whatever
    ends it: the system kills them with the thread that started them, and their standard input closes.
    """

    def __init__(self, command: Sequence[str] = ("-m", "hybridserve.engine.rank_process")) -> None:
        self._command = command
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._num_ranks = 1
        self._host, self._port = "", 0

    def open_store(self, address: str) -> Store:
        store = open_store(address)
        self._host, self._port = store.host, store.port
        return store

    def connect_store(self) -> Store:
        return connect_store(self._host, self._port)

    def start(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if (threads := threads_per_rank(num_ranks)) is not None:
            environment[VARIABLE] = str(threads)
        for rank in range(1, num_ranks):
            self._processes[rank] = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    *self._command,
                    str(rank),
                    self._host,
                    str(self._port),
                    str(os.getpid()),
                ],
                stdin=subprocess.PIPE,
                env=environment,
                process_group=0,  # Ctrl-C is for rank 0 to deal with
            )

    def ended(self) -> Mapping[int, str]:
        ended = {}
        for rank, process in self._processes.items():
            status = process.poll()
            if status is not None:
                ended[rank] = _how(status)
        return ended

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._processes.clear()

    @property
    def num_local_ranks(self) -> int:
        return self._num_ranks

    def describe(self, rank: int) -> str:
        process = self._processes.get(rank)
        return f"rank {rank}" if process is None else f"rank {rank} (process {process.pid})"


class TorchrunLauncher(Launcher):
    """`parallel.executor: torchrun`: every rank runs the same program, and torchrun watches all of them.

    `environment` is what torchrun sets. ValueError if it started another number of ranks than are wanted.
    """

    VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

    def __init__(self, environment: Mapping[str, str], tensor: int, pipeline: int) -> None:
        if missing := [name for name in self.VARIABLES if name not in environment]:
            raise ValueError(
                "parallel.executor: torchrun: it did not start this program, or it would have set "
                f"{missing[0]}"
            )
        self.rank = int(environment["RANK"])
        self.local_rank = int(environment["LOCAL_RANK"])
        self._local_world_size = int(environment["LOCAL_WORLD_SIZE"])
        world_size = int(environment["WORLD_SIZE"])
        if world_size != tensor * pipeline:
            raise ValueError(
                f"parallel.tensor: {tensor} x parallel.pipeline {pipeline} are {tensor * pipeline} ranks, "
                f"but torchrun started {world_size}"
            )
        self._host, self._port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        self._is_host = self.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._prefix = f"hybridserve/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    @classmethod
    def is_present(cls, environment: Mapping[str, str]) -> bool:
        """Whether torchrun has started this process and others."""
        return all(name in environment for name in cls.VARIABLES) and environment["WORLD_SIZE"] != "1"

    def open_store(self, address: str) -> Store:
        if self._is_host:
            return prefixed(open_store(self._host, self._port), self._prefix)
        return self.connect_store()

    def connect_store(self) -> Store:
        return prefixed(connect_store(self._host, self._port), self._prefix)

    def start(self, num_ranks: int) -> None:
        """They run already."""

    def ended(self) -> Mapping[int, str]:
        return {}

    def wait(self, seconds: float) -> None:
        """torchrun does."""

    def stop(self) -> None:
        """They see that rank 0 is gone; and torchrun ends all when one has failed."""

    @property
    def num_local_ranks(self) -> int:
        return self._local_world_size


def threads_per_rank(num_local_ranks: int) -> int | None:
    """Each rank's share of the cores; None where the user has said how many threads there are to be."""
    return None if VARIABLE in os.environ else max(1, usable_cores().num // num_local_ranks)


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    hint = ": was there too little memory?" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
