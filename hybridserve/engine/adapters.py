"""The adapter side of an engine: which content a request is bound to, and loads around steps.

Between the store (what there is), the scheduler (who needs which slot) and the executor (who holds the
weights). Knows no text and no tensors but their dtype.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hybridserve.distributed.failure import RankFailure
from hybridserve.engine.interrupts import Interrupts
from hybridserve.engine.messages import AdapterInfo, AdapterState, AdapterView
from hybridserve.lora.loader import no_pause
from hybridserve.lora.paths import shown
from hybridserve.lora.store import AdapterStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from hybridserve.config.schema import EngineConfig
    from hybridserve.core.adapter_slots import AdapterLoad
    from hybridserve.core.live_requests import TokenEvent
    from hybridserve.core.request import Request
    from hybridserve.core.scheduler import Scheduler
    from hybridserve.engine.executor import Executor
    from hybridserve.engine.planner import EnginePlan
    from hybridserve.lora.loader import Outcome
    from hybridserve.lora.store import Version

_STATES = tuple(AdapterState)

WAIT_SECONDS = 0.1
"""For the loader, at most, where no request can run before it brings something."""

BETWEEN_STEPS = 0.05
"""Seconds after a step for which a load leaves time to a next one, if there are sequences that run: whoever
drives the engine may be doing something else."""


class EngineAdapters:
    """All that an `EngineCore` asks about adapters. Without a store, it serves the base model only."""

    def __init__(self, scheduler: Scheduler, executor: Executor, store: AdapterStore | None = None) -> None:
        self.store = store
        self.num_loads = 0
        self.num_failed_loads = 0
        self.num_evictions = 0
        self.load_seconds = 0.0
        self.interrupts = Interrupts()
        self._scheduler = scheduler
        self._executor = executor
        self._slots = scheduler.adapters
        self._to_start: deque[AdapterLoad] = deque()
        self._loading: dict[str, AdapterLoad] = {}
        self._failures: list[TokenEvent] = []
        if store is not None:
            store.forget = self._forget
            store.is_pinned = self._slots.is_pinned

    @property
    def num_loading(self) -> int:
        """Adapters that are on their way to a slot."""
        return len(self._loading)

    # ---- requests

    def bind(self, name: str | None, prompt_ids: Sequence[int]) -> tuple[str | None, int]:
        """The content that a request for `name` is served with, and the position from which on it is used:
        (None, 0) is the base model. ValueError for an unknown name."""
        if name is None:
            return None, 0
        if self.store is None:
            raise ValueError(f"adapter: {shown(name)} is unknown; this engine serves the base model only")
        version = self.store.find(name)
        if not version.invocation_tokens:
            return version.identity, 0
        start = last_occurrence(prompt_ids, version.invocation_tokens)
        return (None, 0) if start is None else (version.identity, start)

    def acquire(self, request: Request) -> None:
        """A sequence begins, a fork included."""
        if self.store is not None and request.adapter_id is not None:
            self.store.acquire(request.adapter_id)

    def release(self, request: Request) -> None:
        """A sequence has ended."""
        if self.store is not None and request.adapter_id is not None:
            self.store.release(request.adapter_id)

    # ---- loads

    def start_loads(self) -> None:
        """Begin what the scheduler has decided to load. The slots that it gave away are cleared first, so
        that the device never holds more than it may."""
        if self.store is None:
            return
        self._clear_dropped()
        self._to_start.extend(self._scheduler.take_loads())
        self._start_all()

    def step_begins(self) -> None:
        """Loads leave time to it."""
        if self.store is not None:
            self.store.loader.leave_time(math.inf)

    def step_ended(self) -> None:
        if self.store is not None:
            self.store.loader.leave_time(BETWEEN_STEPS if self._scheduler.num_running else 0)

    def _start_all(self) -> None:
        while self._to_start:
            load = self._to_start[0]
            for slot in load.evicted:
                self._executor.clear_adapter(slot)
            if self._loading.get(load.adapter_id) != load:
                self.num_evictions += len(load.evicted)
                self._start(load)
            self._to_start.popleft()

    def _start(self, load: AdapterLoad) -> None:
        assert self.store is not None
        then = partial(self._staged, load, time.monotonic())
        stage = partial(self._executor.stage_adapter, pause=self.store.loader.pause)
        self.store.fetch(load.adapter_id, stage, then)
        self._loading[load.adapter_id] = load

    def _staged(self, load: AdapterLoad, begin: float, outcome: Outcome[Any]) -> None:
        """Called again if it was interrupted, wherever that was."""
        if self._loading.get(load.adapter_id) != load:
            return
        if isinstance(outcome, RankFailure):
            raise outcome  # not the adapter's fault
        if not isinstance(outcome, Exception):
            if self._slots.slot_of(load.adapter_id) is None:
                self._executor.place_adapter(load.slot, load.generation, outcome)
                self._scheduler.adapter_loaded(load.slot)
            self.num_loads += 1
            self.load_seconds += time.monotonic() - begin
        else:
            self.num_failed_loads += 1
            version = self.store.versions.get(load.adapter_id) if self.store else None
            name = version.name if version else load.adapter_id
            reason = f"adapter {name!r} could not be loaded: {outcome}"
            self._failures += self._scheduler.adapter_failed(load.adapter_id, reason)
        del self._loading[load.adapter_id]

    def drop_loads(self) -> None:
        """The ranks for which they were are gone. What will come of those that have begun is nobody's."""
        self._to_start.extend(self._scheduler.take_loads())
        for load in self._to_start:
            for slot in load.evicted:
                self._executor.clear_adapter(slot)
        for adapter_id in [*self._loading, *(load.adapter_id for load in self._to_start)]:
            self._slots.cancel_load(adapter_id)
        self._to_start.clear()
        self._loading.clear()

    def finish_loads(self) -> list[TokenEvent]:
        """Take in, between steps, what the loader has brought; returns the ends of requests whose adapter
        could not be loaded."""
        if self.store is None:
            return []
        self._clear_dropped()
        self.store.loader.poll()
        failures, self._failures = self._failures, []
        return failures

    def _clear_dropped(self) -> None:
        """Before anything is put into a slot that was given to another adapter since."""
        for slot in self._slots.take_dropped():
            self._executor.clear_adapter(slot)

    def wait(self) -> None:
        """Return as soon as `finish_loads` has something to do, or after a moment."""
        if self.store is not None:
            with self.interrupts.let_through():
                self.store.loader.wait(WAIT_SECONDS)

    # ---- names

    def load(self, name: str, path: object) -> Future[Version]:
        """See `AdapterStore.register`; `finish_loads` completes the future."""
        with self.interrupts.held():
            return self._required("load_adapter").register(name, path)

    def unload(self, name: str) -> bool:
        """Take the name away at once. True if nothing refers to its content any more, False while sequences
        that began with it go on. ValueError if there is no such name."""
        store = self._required("unload_adapter")
        with self.interrupts.held():
            version = store.remove(name)
            return bool(version.names) or version.identity not in store.versions

    def pin(self, name: str) -> None:
        """Keep the content that a name has now in a slot, loading it first if it has none. ValueError, and
        nothing has changed, where no slot is to be had now, or none would be left for others."""
        store = self._required("pin_adapter")
        version = store.find(name)
        with self.interrupts.held():
            try:
                self._scheduler.check_pin(version.identity)
                self._check_room_beside(version)
            except ValueError as error:
                raise ValueError(f"adapter: {name!r} can't be pinned: {error}") from None
            if version.identity not in self._slots:
                load = self._slots.begin_load(version.identity, version.device_bytes)
                if load is None:
                    loading = ", some by adapters that are still loading" if self._slots.num_loading else ""
                    raise ValueError(
                        f"adapter: {name!r} can't be pinned now: the room on the device is in use or pinned"
                        f"{loading}"
                    )
                self._to_start.append(load)
                self._start_all()
            self._scheduler.pin_adapter(version.identity)

    def _check_room_beside(self, version: Version) -> None:
        """Of the other adapters that may be named, the smallest at least must fit beside those pinned."""
        assert self.store is not None
        slots = self._slots
        others = [
            other.device_bytes
            for other in self.store.names.values()
            if other is not version and not slots.is_pinned(other.identity)
        ]
        if slots.is_pinned(version.identity) or not others:
            return
        smallest = min(others)
        if not slots.can_ever_fit(version.device_bytes + smallest):
            raise ValueError(
                f"no other adapter would fit beside its {version.device_bytes:,} bytes and what is pinned; "
                f"the smallest has {smallest:,}, device_bytes is {slots.device_bytes:,}"
            )

    def unpin(self, name: str) -> None:
        self._slots.unpin(self._required("unpin_adapter").find(name).identity)

    def _required(self, what: str) -> AdapterStore:
        if self.store is None:
            raise ValueError(f"lora: is off, so {what} is refused; set lora.allow_runtime_loading")
        return self.store

    def _forget(self, identity: str) -> None:
        """Nobody refers to this content any more: its slot is free, or will be when the step that uses it
        is done."""
        if (slot := self._slots.drop(identity)) is not None:
            self._executor.clear_adapter(slot)

    def infos(self) -> list[AdapterInfo]:
        """One a name, by name; then those that have none any more."""
        if self.store is None:
            return []
        named = [self._info(name, version) for name, version in sorted(self.store.names.items())]
        draining = [
            self._info(version.name, version) for version in self.store.versions.values() if not version.names
        ]
        return named + draining

    def info(self, name: str) -> AdapterInfo:
        return self._info(name, self._required("load_adapter").find(name))

    def _info(self, name: str, version: Version) -> AdapterInfo:
        return AdapterInfo(
            name=name,
            identity=version.identity,
            path=version.source.path,
            state=self._state(version),
            rank=version.rank,
            num_bytes=version.num_bytes,
            device_bytes=version.device_bytes,
            num_refs=version.num_refs,
            is_pinned=self._slots.is_pinned(version.identity),
            report=version.report,
        )

    def _state(self, version: Version) -> AdapterState:
        assert self.store is not None
        if not version.names:
            return AdapterState.DRAINING
        if self._slots.slot_of(version.identity) is not None:
            return AdapterState.DEVICE
        if version.identity in self._loading:
            return AdapterState.LOADING
        return AdapterState.HOST if version.identity in self.store.host else AdapterState.DISK

    # ---- numbers

    def views(self, limit: int) -> list[AdapterView]:
        """Of those that may be named, `limit` at most, those on the device first."""
        if self.store is None:
            return []
        views = [
            AdapterView(name=name, state=self._state(version), rank=version.rank)
            for name, version in self.store.names.items()
        ]
        return heapq.nsmallest(limit, views, key=lambda view: (_STATES.index(view.state), view.name))

    def gauges(self) -> dict[str, Any]:
        """For `EngineCore.gauges`: one number each, and under "adapters" a mapping for each of the names that
        were used last."""
        if self.store is None:
            return {}
        return {
            "num_adapters": len(self.store.names),
            "num_adapters_on_device": len(self._slots.ready_ids),
            "num_adapters_on_host": len(self.store.host),
            "adapter_device_bytes": self._slots.num_bytes,
            "adapter_host_bytes": self.store.host.num_bytes,
            "num_adapter_loads": self.num_loads,
            "num_adapter_host_hits": self.store.counters.num_host_hits,
            "num_adapter_disk_reads": self.store.counters.num_disk_reads,
            "num_failed_adapter_loads": self.num_failed_loads,
            "num_adapter_evictions": self.num_evictions,
            "adapter_load_seconds": self.load_seconds,
            "adapters": {
                name: counters._asdict() for name, counters in self._scheduler.adapter_counters().items()
            },
        }

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def create_store(config: EngineConfig, plan: EnginePlan, executor: Executor) -> AdapterStore | None:
    """With the adapters that the plan begins with, read and checked; ValueError for a bad one."""
    if plan.lora is None:
        return None
    store = AdapterStore(
        executor.adaptable_modules,
        getattr(torch, plan.dtype),
        max_rank=plan.lora.max_rank,
        host_bytes=plan.lora.host_bytes,
        max_device_bytes=plan.lora.max_device_bytes,
        roots=plan.lora.roots,
        allow_runtime_loading=plan.lora.allow_runtime_loading,
        reserved_names=config.model_names,
        check=lambda adapter: executor.check_adapter(adapter, no_pause),
    )
    for name, path in plan.lora.adapters.items():
        store.register_now(name, path)
    return store


def last_occurrence(token_ids: Sequence[int], wanted: Sequence[int]) -> int | None:
    """The last index at which `wanted` stands in `token_ids`."""
    wanted, length = list(wanted), len(wanted)
    for start in range(len(token_ids) - length, -1, -1):
        if token_ids[start] == wanted[0] and list(token_ids[start : start + length]) == wanted:
            return start
    return None
