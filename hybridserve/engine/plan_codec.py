"""An `EnginePlan` as JSON, for the ranks that did not make it: they must not derive another one from what
their machine has free.

Knows which classes a plan is made of; does not know what they mean.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec, StateSpec, StateTensor
from hybridserve.engine.adapter_plan import LoraPlan
from hybridserve.engine.graph_plan import GraphPlan
from hybridserve.engine.hardware import Hardware
from hybridserve.engine.host_plan import HostPlan
from hybridserve.engine.plan import BackendChoice, EnginePlan, ParallelPlan, StagePlan
from hybridserve.engine.quantization_plan import QuantizationPlan
from hybridserve.engine.roofline import StageCost
from hybridserve.engine.workspace import Workspace
from hybridserve.layers.footprint import WeightKind
from hybridserve.quant.policy import Quantization

CLASSES: dict[str, type[Any]] = {
    known.__name__: known
    for known in (
        BackendChoice,
        CacheLayout,
        EnginePlan,
        GraphPlan,
        Hardware,
        HostPlan,
        LoraPlan,
        PagedKVSpec,
        ParallelPlan,
        Quantization,
        QuantizationPlan,
        StageCost,
        StagePlan,
        StateSpec,
        StateTensor,
        WeightKind,
        Workspace,
    )
}
TYPE = "__type__"


def encode_plan(plan: EnginePlan) -> bytes:
    return msgspec.json.encode(_plain(plan))


def decode_plan(encoded: bytes) -> EnginePlan:
    """ValueError for anything but what `encode_plan` makes."""
    try:
        plan = _typed(msgspec.json.decode(encoded))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a plan of this version: {error}") from None
    if not isinstance(plan, EnginePlan):
        raise ValueError(f"not a plan: {type(plan).__name__}")
    return plan


def _plain(value: Any) -> Any:
    """Lists, dicts and numbers; what JSON has no word for is a dict that says its type."""
    name = type(value).__name__
    if name in CLASSES:
        names = [field.name for field in fields(value)] if is_dataclass(value) else value._fields
        return {TYPE: name, **{each: _plain(getattr(value, each)) for each in names}}
    if isinstance(value, Path):
        return {TYPE: "Path", "path": str(value)}
    if isinstance(value, dict):
        return {TYPE: "dict", "items": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return {TYPE: "list", "items": [_plain(item) for item in value]}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a plan can't hold {name}: {value!r}")


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_typed(item) for item in value)
    if not isinstance(value, dict):
        return value
    items = {key: _typed(item) for key, item in value.items()}
    name = items.pop(TYPE)
    if name in ("dict", "list"):
        return (dict if name == "dict" else list)(items["items"])
    return Path(items["path"]) if name == "Path" else CLASSES[name](**items)
