"""What would fit where a deployment does not: the nearest size, format or device. Knows the keys that help;
that one of them is enough, the planner says.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridserve.engine.arena_plan import DoesNotFitError
from hybridserve.engine.hardware import HARDWARE, choose_hardware
from hybridserve.engine.planner import make_plan, plan_model
from hybridserve.engine.units import size_below
from hybridserve.models.config import load_hf_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from hybridserve.config.schema import EngineConfig
    from hybridserve.engine.plan import EnginePlan

TENSORS = (2, 4, 8, 16, 32, 64)
PIPELINES = (2, 4, 8)
LEAST_BATCHED_TOKENS = 512


class _Change(NamedTuple):
    """A key, its value, and that value as it is written."""

    key: str
    value: Any
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


_Axis = list[_Change]
"""Values of one key, the least change first."""


def plan_or_suggest(
    config: EngineConfig, hf_config: Mapping[str, Any], *, shape: str | None = None
) -> EnginePlan:
    """As `plan_model`; a refusal for lack of memory ends with what would be enough."""
    try:
        return plan_model(config, hf_config, shape=shape)
    except DoesNotFitError as error:
        raise _with_hint(error, config, hf_config) from None


def make_plan_or_suggest(config: EngineConfig, model_path: Path) -> EnginePlan:
    """As `make_plan`, likewise."""
    try:
        return make_plan(config, model_path)
    except DoesNotFitError as error:
        raise _with_hint(error, config, load_hf_config(model_path)) from None


def _with_hint(error: DoesNotFitError, config: EngineConfig, hf_config: Mapping[str, Any]) -> DoesNotFitError:
    found = [" with ".join(map(str, each)) for each in _nearest(config, hf_config, error)]
    hint = f"; what would fit: {', or '.join(found)}" if found else ""
    return DoesNotFitError(f"{error}{hint}", room=error.room, key=error.key)


def _nearest(
    config: EngineConfig, hf_config: Mapping[str, Any], error: DoesNotFitError
) -> Sequence[tuple[_Change, ...]]:
    """For each key that helps, its first value that is enough; and the first two keys together that are,
    where that takes fewer devices. Those that take the fewest come first."""
    larger = _larger(config)
    axes = [*_smaller(config, error), *larger]
    found: list[tuple[_Change, ...]] = []
    for axis in axes:
        fitting = ((change,) for change in axis if _fits(config, hf_config, change))
        found.extend(itertools.islice(fitting, 1))
    fewest = min((_num_ranks(config, each) for each in found), default=math.inf)
    pairs = [
        pair
        for axis, other in itertools.combinations(larger, 2)
        for pair in itertools.product(axis, other)
        if _num_ranks(config, pair) < fewest
    ]
    for pair in sorted(pairs, key=lambda pair: _num_ranks(config, pair)):
        if _fits(config, hf_config, *pair):
            found.append(pair)
            break
    return sorted(found, key=lambda each: _num_ranks(config, each))


def _smaller(config: EngineConfig, error: DoesNotFitError) -> Iterator[_Axis]:
    """What asks for less of the devices that there are; each is tried alone."""
    if error.room > 0:
        text, size = size_below(error.room)
        yield [_Change(error.key, size, text)]
    if not choose_hardware(config).is_here:  # of this machine, activations are not counted
        key, tokens = "scheduler.max_num_batched_tokens", config.scheduler.max_num_batched_tokens
        powers = range((tokens - 1).bit_length() - 1, LEAST_BATCHED_TOKENS.bit_length() - 2, -1)
        yield [_Change(key, 2**power, str(2**power)) for power in powers]


def _larger(config: EngineConfig) -> list[_Axis]:
    """More devices, smaller weights, larger devices. Where this machine is meant, only weights can change."""
    parallel, quantization = config.parallel, config.quantization
    if quantization.format in ("auto", "none"):
        formats = [_Change("quantization.format", "int8", "int8")]
    elif quantization.targets is not None and "all" not in quantization.targets:
        formats = [_Change("quantization.targets", ("all",), "all")]
    else:
        formats = []
    memory = choose_hardware(config).memory_bytes
    if memory is None:
        return [formats]
    sizes = {name: each.memory_bytes or 0 for name, each in HARDWARE.items()}
    devices = sorted((name for name in sizes if sizes[name] > memory), key=sizes.__getitem__)
    return [
        [_Change("parallel.tensor", size, str(size)) for size in TENSORS if size > parallel.tensor],
        formats,
        [_Change("hardware", name, name) for name in devices],
        [_Change("parallel.pipeline", size, str(size)) for size in PIPELINES if size > parallel.pipeline],
    ]


def _num_ranks(config: EngineConfig, changes: tuple[_Change, ...]) -> int:
    changed = {change.key: change.value for change in changes}
    tensor = changed.get("parallel.tensor", config.parallel.tensor)
    pipeline = changed.get("parallel.pipeline", config.parallel.pipeline)
    return int(tensor * pipeline)


def _fits(config: EngineConfig, hf_config: Mapping[str, Any], *changes: _Change) -> bool:
    for key, value, _ in changes:
        section, _, name = key.rpartition(".")
        if section:
            inner = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: inner})
        else:
            config = config.model_copy(update={name: value})
    try:
        plan_model(config, hf_config)
    except ValueError:  # too little memory still, or a size that this model can't be divided by
        return False
    return True
