"""Real ranks: processes over gloo that run functions of the tests, all at once, and give back what they
return.

Starting one costs seconds, most of it importing torch, so they are started once, when first asked for, and
serve every topology that they are enough for. A rank that raises takes the others down with it; the next call
starts fresh ones.
"""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch

from hybridserve.distributed.groups import Groups
from hybridserve.distributed.process_group import connect_store, open_store
from hybridserve.distributed.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

ADDRESS = "127.0.0.1"
STEP_TIMEOUT = 60.0
CALL_TIMEOUT = 120.0


class RankFailure(AssertionError):
    """What a rank raised, with its traceback."""


@dataclass(frozen=True)
class Rank:
    """What a function is given first: who it is, and the groups that it is in."""

    topology: Topology
    groups: Groups

    @property
    def tp(self) -> Any:
        return self.groups.tp

    @property
    def pipeline(self) -> Any:
        return self.groups.pipeline


@dataclass
class RankPool:
    """Processes 0 .. n-1 of any topology of up to that many ranks."""

    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    store: Any = None

    def run(
        self, tensor: int, pipeline: int, function: Callable[..., Any], *arguments: Any, **options: Any
    ) -> list[Any]:
        """`function(rank, *arguments, **options)` on each of tensor x pipeline ranks; the results in their
        order. The function is one of a module; tensors travel back as tensors. RankFailure if one raises."""
        size = tensor * pipeline
        self._grow(size)
        for pipe in self.pipes[:size]:
            pipe.send((tensor, pipeline, function, arguments, options))
        results: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:size])}
        while waiting:
            ready = wait(list(waiting), CALL_TIMEOUT)
            if not ready:
                self._fail(f"ranks {sorted(waiting.values())} did not answer in time")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    error, result = pipe.recv()
                except EOFError:
                    error, result = "died", None
                if error:
                    self._fail(f"rank {rank} of {tensor} x {pipeline}: {error}")
                results[rank] = _unpack(result)
        return [results[rank] for rank in range(size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes, self.store = [], [], None

    def _grow(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        if self.store is None:
            self.store = open_store(ADDRESS)
        for rank in range(len(self.processes), size):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self.store.port), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(pipe)

    def _fail(self, reason: str) -> None:
        self.close()
        raise RankFailure(reason)


def _serve(rank: int, pipe: Connection, port: int) -> None:
    torch.set_num_threads(1)
    store = connect_store(ADDRESS, port)
    known: dict[tuple[int, int], Rank] = {}
    while True:
        try:
            tensor, pipeline, function, arguments, options = pipe.recv()
        except EOFError:
            sys.exit()
        try:
            if (tensor, pipeline) not in known:
                known[tensor, pipeline] = _connect(Topology(tensor, pipeline, rank), store)
            result = function(known[tensor, pipeline], *arguments, **options)
            pipe.send((None, _pack(result)))
        except BaseException:  # whatever it is, the test shall see it
            pipe.send((traceback.format_exc(), None))


def _connect(topology: Topology, store: Any) -> Rank:
    prefixed = torch.distributed.PrefixStore(f"{topology.tensor}x{topology.pipeline}", store)
    groups = Groups.connect(prefixed, topology, ADDRESS, torch.device("cpu"), STEP_TIMEOUT, has_adapters=True)
    return Rank(topology, groups)


class _Travelling:
    """A tensor on its way from one process to another: bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self.data = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""

    def arrive(self) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)


def _pack(value: Any) -> Any:
    return _Travelling(value) if isinstance(value, torch.Tensor) else _inside(value, _pack)


def _unpack(value: Any) -> Any:
    return value.arrive() if isinstance(value, _Travelling) else _inside(value, _unpack)


def _inside(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Through lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: convert(each) for key, each in value.items()}
    return type(value)(map(convert, value)) if type(value) in (list, tuple) else value
