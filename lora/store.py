"""Which adapters there are, by name and by content, and where their weights are while no slot holds them.

Knows names, versions (the content that a name had at some time), who refers to them, and bytes of host
memory; knows no request, no step and no slot. Reading, checking and staging happen on the `Loader`'s thread;
everything in this class is the engine thread's alone, so there are no locks.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from hybridserve.lora.adapter import AdapterError, read_adapter
from hybridserve.lora.layers import device_bytes
from hybridserve.lora.loader import Loader
from hybridserve.lora.paths import AdapterSource, check_name, runtime_source, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    import torch

    from hybridserve.layers.lora import AdaptableModule
    from hybridserve.lora.adapter import Adapter
    from hybridserve.lora.loader import Outcome
    from hybridserve.lora.report import LoadReport

T = TypeVar("T")

MAX_NAMES = 4096
MAX_PENDING_REGISTRATIONS = 64
MAX_SHOWN = 8


@dataclass(slots=True, eq=False)
class Version:
    """One adapter content: what is known of it whether or not its weights are in memory."""

    identity: str
    name: str
    """The name that it was last given."""
    source: AdapterSource
    rank: int
    num_bytes: int  # of host memory
    device_bytes: int
    invocation_tokens: tuple[int, ...]
    report: LoadReport
    names: set[str] = field(default_factory=set)
    num_refs: int = 0
    """Sequences that began with it and have not ended."""


class HostTier:
    """Adapters in host memory, the least recently used ones forgotten first.

    Pinned ones are not: their files may be gone. Never more than `capacity` bytes; what does not fit is not
    kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()
        self._pinned: set[str] = set()

    def __contains__(self, identity: str) -> bool:
        return identity in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, identity: str) -> Adapter | None:
        adapter = self._adapters.get(identity)
        if adapter is not None:
            self._adapters.move_to_end(identity)
        return adapter

    def put(self, adapter: Adapter, *, pinned: bool = False) -> bool:
        """Whether it was kept."""
        self.remove(adapter.identity)
        pinned_bytes = sum(self._adapters[identity].num_bytes for identity in self._pinned)
        if pinned_bytes + adapter.num_bytes > self.capacity:
            return False
        for identity in [name for name in self._adapters if name not in self._pinned]:
            if self.num_bytes + adapter.num_bytes <= self.capacity:
                break
            self.remove(identity)
        self._adapters[adapter.identity] = adapter
        self.num_bytes += adapter.num_bytes
        if pinned:
            self._pinned.add(adapter.identity)
        return True

    def pin(self, identity: str) -> None:
        self._pinned.add(self._adapters[identity].identity)

    def unpin(self, identity: str) -> None:
        self._pinned.discard(identity)

    def remove(self, identity: str) -> None:
        self._pinned.discard(identity)
        adapter = self._adapters.pop(identity, None)
        if adapter is not None:
            self.num_bytes -= adapter.num_bytes


@dataclass(slots=True)
class StoreCounters:
    num_host_hits: int = 0
    num_disk_reads: int = 0


class AdapterStore:
    """All adapters of an engine, for a model that offers `modules`.

    A name leads to the version that it has now; a version lives as long as a name or a sequence refers to it.
    `check` is asked, on the loader's thread, about what only the base model's weights tell of a new one:
    ValueError refuses it.

    forget: is told the identity of each version that dies.
    is_pinned: whether a version is kept on the device.
    """

    forget: Callable[[str], None]
    is_pinned: Callable[[str], bool]

    def __init__(
        self,
        modules: Mapping[str, AdaptableModule],
        dtype: torch.dtype,
        *,
        max_rank: int,
        host_bytes: int,
        max_device_bytes: int | None = None,
        roots: Sequence[Path] = (),
        allow_runtime_loading: bool = False,
        reserved_names: Collection[str] = (),
        check: Callable[[Adapter], None] = lambda adapter: None,
    ) -> None:
        self.counters = StoreCounters()
        self.host = HostTier(host_bytes)
        self.loader = Loader("hybridserve-adapters")
        self.versions: dict[str, Version] = {}
        self.forget = lambda identity: None
        self.is_pinned = lambda identity: False
        self._check = check
        self._modules = modules
        self._dtype = dtype
        self._max_rank = max_rank
        self._max_device_bytes = max_device_bytes
        self._roots = list(roots)
        self._allow_runtime_loading = allow_runtime_loading
        self._reserved = frozenset(reserved_names)
        self._names: dict[str, Version] = {}
        self._registrations: list[Future[Version]] = []

    # ---- names

    @property
    def names(self) -> Mapping[str, Version]:
        return self._names

    def find(self, name: str) -> Version:
        """ValueError, naming the field and what there is, for a name that leads nowhere."""
        version = self._names.get(name)
        if version is None:
            raise ValueError(f"adapter: {shown(name)} is unknown; {self._listing()}")
        return version

    def _listing(self) -> str:
        if not self._names:
            return "no adapter is loaded"
        known = sorted(self._names)
        more = f" and {len(known) - MAX_SHOWN} more" if len(known) > MAX_SHOWN else ""
        return f"there is {', '.join(known[:MAX_SHOWN])}{more}"

    def register_now(self, name: str, path: Path) -> None:
        """Read and register an adapter that the configuration names, at start-up. ValueError."""
        try:
            check_name(name, self._reserved)
            source = AdapterSource(path)
            self._take(name, source, self._read_new(source))
        except ValueError as error:
            raise _prefixed(f"lora.adapters.{name}", error) from None

    def register(self, name: str, path: object) -> Future[Version]:
        """Read an adapter off the engine's thread, and give it the name when `loader.poll` brings it.

        A name that is in use is given the new content then: sequences that run stay with the old one. Raises
        ValueError for what can be refused at once; the future raises it for a bad adapter. A future that is
        cancelled before it is done changes nothing.
        """
        self._check_runtime_loading("load_adapter")
        check_name(name, self._reserved)
        source = runtime_source(path, self._roots)
        self._registrations = [one for one in self._registrations if not one.done()]
        if len(self._registrations) >= MAX_PENDING_REGISTRATIONS:
            raise ValueError(f"adapter: {len(self._registrations)} are being loaded; try again later")
        future: Future[Version] = Future()

        def then(outcome: Outcome[Adapter]) -> None:
            if future.done():
                return
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                version = self._take(name, source, outcome)
            except ValueError as error:
                future.set_exception(_prefixed(f"adapter {name!r}", error))
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(version)

        self.loader.submit(lambda: self._read_new(source), then)
        self._registrations.append(future)
        return future

    def remove(self, name: str) -> Version:
        """Take a name away from new requests; returns the version that it led to. ValueError if there is
        none."""
        self._check_runtime_loading("unload_adapter")
        version = self.find(name)
        del self._names[name]
        self._unname(version, name)
        return version

    def _check_runtime_loading(self, what: str) -> None:
        if not self._allow_runtime_loading:
            raise ValueError(f"lora.allow_runtime_loading: is off, so {what} is refused")

    def _take(self, name: str, source: AdapterSource, adapter: Adapter) -> Version:
        """Give a name the content of an adapter that was just read."""
        num_bytes = device_bytes(adapter, self._modules, self._dtype)
        if self._max_device_bytes is not None and num_bytes > self._max_device_bytes:
            raise ValueError(
                f"{source.path}: needs {num_bytes:,} bytes on the device, lora.device_bytes is "
                f"{self._max_device_bytes:,}"
            )
        if name not in self._names and len(self._names) >= MAX_NAMES:
            raise ValueError(f"{len(self._names)} adapters are loaded, which is the most that may be")
        version, old = self.versions.get(adapter.identity), self._names.get(name)
        if old is not None and old is not version and len(old.names) == 1 and self.is_pinned(old.identity):
            raise ValueError(f"{name!r} is pinned, and with other content would not be: unpin_adapter first")
        if version is None:
            version = self.versions[adapter.identity] = Version(
                identity=adapter.identity,
                name=name,
                source=source,
                rank=adapter.max_rank,
                num_bytes=adapter.num_bytes,
                device_bytes=num_bytes,
                invocation_tokens=adapter.invocation_tokens,
                report=adapter.report,
            )
        # the same content, where it was seen last
        version.name, version.source, version.report = name, source, adapter.report
        version.names.add(name)
        self._names[name] = version
        self.host.unpin(version.identity)
        if adapter.identity not in self.host:
            self.host.put(adapter)
        if old is not None and old is not version:
            self._unname(old, name)
        return version

    def _unname(self, version: Version, name: str) -> None:
        version.names.discard(name)
        if version.names:
            return
        if not version.num_refs:
            self._forget(version)
        elif version.identity in self.host:
            self.host.pin(version.identity)
        else:
            self._rescue(version)

    def _rescue(self, version: Version) -> None:
        """Read a version that has lost its name while there are files to read. Where they have changed
        already, those who still need to load it will be told."""

        def then(outcome: Outcome[Adapter]) -> None:
            if self.versions.get(version.identity) is version and not isinstance(outcome, Exception):
                self.host.put(outcome, pinned=not version.names)

        self.loader.submit(lambda: self._read_again(version.source, version.identity), then)

    # ---- references

    def acquire(self, identity: str) -> None:
        self.versions[identity].num_refs += 1

    def release(self, identity: str) -> None:
        version = self.versions[identity]
        if not version.num_refs:
            raise RuntimeError(f"adapter {version.name!r} was released more often than it was acquired")
        version.num_refs -= 1
        if not version.num_refs and not version.names:
            self._forget(version)

    def _forget(self, version: Version) -> None:
        self.host.remove(version.identity)
        del self.versions[version.identity]
        self.forget(version.identity)

    # ---- weights

    def device_bytes(self, identity: str) -> int:
        return self.versions[identity].device_bytes

    def fetch(self, identity: str, stage: Callable[[Adapter], T], then: Callable[[Outcome[T]], None]) -> None:
        """Find a version's weights in host memory or read them again, and `stage` them, off the engine's
        thread; `then` is called by `loader.poll` with what came of it."""
        version = self.versions[identity]
        adapter = self.host.get(identity)
        if adapter is None:
            self.counters.num_disk_reads += 1
        else:
            self.counters.num_host_hits += 1

        def work() -> tuple[Adapter, T]:
            found = adapter or self._read_again(version.source, identity)
            return found, stage(found)

        def done(outcome: Outcome[tuple[Adapter, T]]) -> None:
            if isinstance(outcome, Exception):
                then(outcome)
                return
            found, staged = outcome
            if self.versions.get(identity) is version and identity not in self.host:
                self.host.put(found, pinned=not version.names)
            then(staged)

        self.loader.submit(work, done)

    def _read(self, source: AdapterSource) -> Adapter:
        source.check()
        adapter = read_adapter(
            source.path,
            self._modules,
            max_rank=self._max_rank,
            dtype=self._dtype,
            pause=self.loader.pause,
        )
        source.check()
        return adapter

    def _read_new(self, source: AdapterSource) -> Adapter:
        adapter = self._read(source)
        if adapter.needs_base:
            self._check(adapter)
        return adapter

    def _read_again(self, source: AdapterSource, identity: str) -> Adapter:
        adapter = self._read(source)
        if adapter.identity != identity:
            raise ValueError(f"{source.path}: the files have changed since the adapter was loaded")
        return adapter

    def close(self) -> None:
        self.loader.close()


def _prefixed(name: str, error: ValueError) -> ValueError:
    message = f"{name}: {error}"
    return AdapterError(message, error.report) if isinstance(error, AdapterError) else ValueError(message)
