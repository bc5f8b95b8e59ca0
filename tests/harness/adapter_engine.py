"""A guarded engine with adapters, and an oracle for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridserve.core.request import SamplingParams
from tests.harness.adapters import merged
from tests.harness.engine import Guarded, Oracle

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from hybridserve.engine.messages import AdapterInfo
    from tests.harness.adapters import Kit


class Oracles:
    """Name of `harness.adapters.ADAPTERS` (None: the base) -> the oracle of the merged model."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._made: dict[str | None, Oracle] = {}

    def __getitem__(self, name: str | None) -> Oracle:
        if name not in self._made:
            kit = self._kit
            model = kit.model if name is None else merged(kit.base, kit.adapter(name))
            self._made[name] = Oracle(model)
        return self._made[name]


class AdapterEngine(Guarded):
    """`names` are those of the kit, in whose directory anything may be loaded from; further settings of
    `lora` are options. Requests are checked against the oracle of what they asked for."""

    def __init__(
        self,
        kit: Kit,
        names: Iterable[str] = (),
        *,
        lora: dict[str, Any] | None = None,
        roots: Sequence[Path] = (),
        **options: Any,
    ) -> None:
        settings = {
            "adapters": {name: str(kit.adapter(name)) for name in names},
            "allow_runtime_loading": True,
            "roots": [str(kit.root), *map(str, roots)],
            **(lora or {}),
        }
        super().__init__(kit.base, lora=settings, **options)
        self.asked: dict[str, str | None] = {}

    def ask(
        self, request_id: str, prompt: Sequence[int], adapter: str | None, num_tokens: int = 6, **more: Any
    ) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **more)
        self.add(request_id, prompt, params, adapter=adapter)
        self.asked[request_id] = adapter

    def check_all(self, oracles: Oracles, **content: str | None) -> None:
        """`content`: request id -> the kit's name of what was served, where it isn't what was asked for."""
        for (request_id, _), result in self.results.items():
            assert result.finish_reason == "length", request_id
            oracles[content.get(request_id, self.asked[request_id])].check(result)

    def load(self, name: str, path: object) -> None:
        self.core.wait_for_load(self.core.adapters.load(name, path))

    def unload(self, name: str) -> bool:
        return self.core.adapters.unload(name)

    def info(self, name: str) -> AdapterInfo:
        return self.core.adapters.info(name)

    @property
    def held_bytes(self) -> tuple[int, int, int]:
        """Of adapters: in slots by the books, in slots by what is there, in host memory."""
        store, worker = self.core.adapters.store, self.executor.worker
        assert store is not None
        assert worker is not None
        return self.core.scheduler.adapters.num_bytes, worker.adapter_bytes, store.host.num_bytes
