"""What a configuration and a model mean for adapters. Knows limits and directories; reads no adapter."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridserve.core.adapter_slots import AdapterSlots
from hybridserve.engine.units import size_text
from hybridserve.models.hub import bundled_adapters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hybridserve.config.schema import EngineConfig
    from hybridserve.layers.context import BuildContext

MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Adapters: which there are from the start, and how many may be where."""

    adapters: Mapping[str, Path]
    """From the configuration, or those that come with the model where it names none."""
    num_slots: int
    max_rank: int
    max_device_bytes: int | None
    host_bytes: int
    allow_runtime_loading: bool
    roots: tuple[Path, ...]
    num_modules: int
    """Modules of the model that adapters may change."""
    poison_freed: bool

    def slots(self) -> AdapterSlots:
        return AdapterSlots(self.num_slots, self.max_device_bytes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "adapters": {name: str(path) for name, path in self.adapters.items()},
            "max_loaded": self.num_slots,
            "max_rank": self.max_rank,
            "device_bytes": self.max_device_bytes,
            "host_bytes": self.host_bytes,
            "allow_runtime_loading": self.allow_runtime_loading,
            "roots": [str(root) for root in self.roots],
            "num_modules": self.num_modules,
        }

    def rows(self) -> list[tuple[str, str]]:
        """For `EnginePlan.table`."""
        on_device = "" if self.max_device_bytes is None else f" in {size_text(self.max_device_bytes)}"
        names = list(self.adapters)
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        known = f"{', '.join(names[:MAX_SHOWN])}{more}" if names else "none yet"
        runtime = "; more may be loaded while serving" if self.allow_runtime_loading else ""
        return [
            ("adapters", known + runtime),
            (
                "",
                f"{self.num_slots} on the device{on_device}, {size_text(self.host_bytes)} of host memory, "
                f"rank up to {self.max_rank}, {self.num_modules} modules",
            ),
        ]


def initial_adapters(config: EngineConfig, *, here: bool = True) -> dict[str, Path]:
    """Absolute, by name. ValueError for no directory, if they are to be on this machine; files are looked at
    when the engine starts."""
    if config.lora.adapters is None:
        return bundled_adapters(config.model)
    adapters = {name: _home(path) for name, path in config.lora.adapters.items()}
    for name, path in adapters.items():
        if here and not _is_directory(path):
            raise ValueError(f"lora.adapters.{name}: {path}: no such directory")
    return adapters


def _is_directory(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir() raises for names that are too long


def _home(path: str) -> Path:
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111 - Path.expanduser() raises for a user that isn't there


def plan_lora(
    config: EngineConfig,
    adapters: Mapping[str, Path],
    contexts: Sequence[BuildContext],
    *,
    here: bool = True,
) -> LoraPlan | None:
    """`contexts`: those of all stages. Directories are looked for only where they are to be on this
    machine."""
    registries = [context.lora for context in contexts if context.lora is not None]
    if not registries:
        return None
    lora = config.lora
    roots = tuple(map(_home, lora.roots))
    if here and (missing := [str(root) for root in roots if not _is_directory(root)]):
        warnings.warn(f"lora.roots: no such directory: {', '.join(missing)}", stacklevel=2)
    return LoraPlan(
        adapters=adapters,
        num_slots=lora.max_loaded,
        max_rank=lora.max_rank,
        max_device_bytes=lora.device_bytes,
        host_bytes=lora.host_bytes,
        allow_runtime_loading=lora.allow_runtime_loading,
        roots=roots,
        num_modules=sum(len(registry.modules) + registry.num_elsewhere for registry in registries),
        poison_freed=config.cache.check_integrity,
    )
