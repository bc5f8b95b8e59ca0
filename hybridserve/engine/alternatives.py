"""What would fit where a deployment does not: the nearest size, format or device. Knows the keys that help;
that one of them is enough, the planner says.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from hybridserve.engine.arena_plan import DoesNotFitError
from hybridserve.engine.hardware import HARDWARE
from hybridserve.engine.planner import plan_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hybridserve.config.schema import EngineConfig
    from hybridserve.engine.plan import EnginePlan

TENSORS = (2, 4, 8, 16, 32, 64)
PIPELINES = (2, 4, 8)

Change = tuple[str, Any]
"""A key and its value."""


def plan_or_suggest(
    config: EngineConfig, hf_config: Mapping[str, Any], *, shape: str | None = None
) -> EnginePlan:
    """As `plan_model`; a refusal for lack of memory on a GPU ends with what would be enough."""
    try:
        return plan_model(config, hf_config, shape=shape)
    except DoesNotFitError as error:
        if config.hardware in ("auto", "cpu"):
            raise
        found = [
            " with ".join(f"{key}: {value}" for key, value in each) for each in _nearest(config, hf_config)
        ]
        hint = f"; what would fit: {', or '.join(found)}" if found else ""
        raise DoesNotFitError(f"{error}{hint}") from None


def _nearest(config: EngineConfig, hf_config: Mapping[str, Any]) -> Iterator[tuple[Change, ...]]:
    """For each key that helps, its first value that is enough; where none is, the first two together that
    are."""
    axes = _axes(config)
    found = False
    for axis in axes:
        for change in axis:
            if _fits(config, hf_config, change):
                found = True
                yield (change,)
                break
    if found:
        return
    for index, axis in enumerate(axes):
        for other in axes[index + 1 :]:
            for pair in product(axis, other):
                if _fits(config, hf_config, *pair):
                    yield pair
                    return


def _axes(config: EngineConfig) -> list[list[Change]]:
    """Values of each key, the least change first."""
    parallel, quantization = config.parallel, config.quantization
    tensors = [size for size in TENSORS if size > parallel.tensor]
    formats: list[Change] = []
    if quantization.format in ("auto", "none"):
        formats.append(("quantization.format", "int8"))
    elif quantization.targets is not None:
        formats.append(("quantization.targets", "all"))
    here = HARDWARE[config.hardware].memory_bytes or 0
    larger = {each.name: each.memory_bytes or 0 for each in HARDWARE.values()}
    devices = sorted((name for name in larger if larger[name] > here), key=larger.__getitem__)
    pipelines = [size for size in PIPELINES if size > parallel.pipeline]
    return [
        [("parallel.tensor", size) for size in tensors],
        formats,
        [("hardware", name) for name in devices],
        [("parallel.pipeline", size) for size in pipelines],
    ]


def _fits(config: EngineConfig, hf_config: Mapping[str, Any], *changes: Change) -> bool:
    for key, value in changes:
        section, _, name = key.rpartition(".")
        if section:
            changed = {name: (value,) if name == "targets" else value}
            config = config.model_copy(update={section: getattr(config, section).model_copy(update=changed)})
        else:
            config = config.model_copy(update={name: value})
    try:
        plan_model(config, hf_config)
    except ValueError:  # too little memory still, or a size that this model can't be divided by
        return False
    return True
