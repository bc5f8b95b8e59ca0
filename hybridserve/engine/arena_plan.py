"""How large the arena is, and how it is cut: what a configuration asks for, within what this machine has or
what a device that is only planned for would have.

Knows bytes and what layers remember; knows no weight and no backend.
"""

from __future__ import annotations

import contextlib
import math
import resource
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from hybridserve.core.cache_spec import MIN_SLABS, CacheLayout
from hybridserve.engine import gpus
from hybridserve.engine.hardware import num_ranks_here
from hybridserve.engine.units import UNITS, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hybridserve.config.schema import EngineConfig
    from hybridserve.core.cache_spec import CacheSpec
    from hybridserve.engine.hardware import Hardware


class DoesNotFitError(ValueError):
    """A deployment that needs more memory than there is, and how much.

    room: bytes that each rank could have of what `key` asks more for; 0: there is no such key.
    """

    def __init__(self, message: str, *, room: int = 0, key: str = "cache.memory_bytes") -> None:
        super().__init__(message)
        self.room = room
        self.key = key


class Budget(NamedTuple):
    """What one rank's arena may take."""

    num_bytes: int
    source: str
    """Where that comes from, as messages begin with it."""
    is_limit: bool
    """Whether less is taken where `max_num_seqs` sequences need less."""


def plan_arena(
    config: EngineConfig, stages: Sequence[Sequence[CacheSpec]], max_model_len: int, budget: Budget
) -> tuple[CacheLayout, tuple[CacheLayout, ...]]:
    """What the scheduler goes by, and each stage's own layout: see `CacheLayout.build_stages`. `stages` are
    the cache specs of one rank of each.

    DoesNotFitError, naming the key, where a sequence of `max_model_len` tokens would not fit, with what
    would.
    """
    cache = config.cache

    def layouts(arena_bytes: int) -> tuple[CacheLayout, tuple[CacheLayout, ...]]:
        return CacheLayout.build_stages(stages, cache.block_size, arena_bytes, max_model_len)

    def longest(arena_bytes: int) -> float:
        """Tokens of one sequence that an arena of this size holds."""
        try:
            tokens = layouts(arena_bytes)[0].max_tokens_one_sequence()
        except ValueError:  # not even two slabs
            return 0
        return math.inf if tokens is None else tokens

    layouts(1 << 62)  # raises for what more memory would not help
    source = budget.source
    if (fits := longest(budget.num_bytes)) < max_model_len:
        needed = _smallest_size(lambda arena_bytes: longest(arena_bytes) >= max_model_len)
        if not fits:
            raise DoesNotFitError(
                f"{source} is too small an arena for a sequence of max_model_len ({max_model_len:,}) "
                f"or any other: give the cache {needed}"
            )
        raise DoesNotFitError(
            f"{source} holds one sequence of {fits:,} tokens at most, not of max_model_len "
            f"({max_model_len:,}): set max_model_len to {fits} or less, or give the cache {needed}"
        )
    planned = layouts(budget.num_bytes)
    if budget.is_limit:
        # fewer slabs than MIN_SLABS would be cut anew, with more padding
        whole = planned[0]
        wanted = max(1 + whole.slabs_for(max_model_len, config.scheduler.max_num_seqs), MIN_SLABS)
        if wanted < whole.num_slabs:
            planned = layouts(wanted * whole.slab_bytes)
    return planned


def machine_budget(config: EngineConfig, weight_bytes: int) -> Budget:
    """Of the machine at hand, whose memory all ranks share; `weight_bytes` are those of all of them. A share
    is taken of what a set size of host memory leaves. DoesNotFitError where weights and arenas are more than
    it has."""
    cache, num_ranks = config.cache, config.parallel.num_ranks
    each = "" if num_ranks == 1 else f" / {num_ranks} ranks"
    if cache.memory_bytes is not None:
        source = f"cache.memory_bytes: {size_text(cache.memory_bytes)}"
        num_here = num_ranks_here(config)
        times = f" x {num_here} ranks" if num_here > 1 else ""
        total, weights = total_memory(), weight_bytes * num_here // num_ranks
        if weights + cache.memory_bytes * num_here > total:
            raise DoesNotFitError(
                f"{source}{times}, beside {size_text(weights)} of weights, is more than the "
                f"{size_text(total)} of memory that this machine has",
                room=(total - weights) // num_here,
            )
        return Budget(cache.memory_bytes, source, is_limit=False)
    available = available_memory()
    free = available - weight_bytes
    if free <= 0:
        raise DoesNotFitError(
            f"model: {size_text(weight_bytes)} of weights don't fit into the {size_text(available)} of "
            f"memory that this machine has free"
        )
    taken = f"{size_text(weight_bytes)} of weights"
    if cache.host_swap_bytes != "auto" and cache.host_swap_bytes:
        host_bytes = cache.host_swap_bytes * num_ranks
        if free <= host_bytes:
            times = "" if num_ranks == 1 else f" x {num_ranks} ranks"
            raise DoesNotFitError(
                f"cache.host_swap_bytes: {size_text(cache.host_swap_bytes)}{times} are not less than the "
                f"{size_text(free)} that {taken} leave free",
                room=free // 2 // num_ranks,
                key="cache.host_swap_bytes",
            )
        free -= host_bytes
        taken += f" and {size_text(host_bytes)} of host memory"
    source = (
        f"cache.memory_fraction: {cache.memory_fraction} of the {size_text(free)} that "
        f"{taken} leave free{each}"
    )
    return Budget(int(cache.memory_fraction * free) // num_ranks, source, is_limit=True)


def device_budget(config: EngineConfig, hardware: Hardware, taken: int, what: str) -> Budget:
    """Of a device that each rank has for itself, where `what` has `taken` bytes already. DoesNotFitError if
    nothing is left."""
    cache, memory = config.cache, hardware.memory_bytes
    assert memory is not None
    if cache.memory_bytes is not None:
        if taken + cache.memory_bytes > memory:
            raise DoesNotFitError(
                f"cache.memory_bytes: {size_text(cache.memory_bytes)}, beside {what}, is more than the "
                f"{size_text(memory)} of one {hardware.title}",
                room=int(cache.memory_fraction * memory) - taken,
            )
        source = f"cache.memory_bytes: {size_text(cache.memory_bytes)}"
        return Budget(cache.memory_bytes, source, is_limit=False)
    share = (
        f"cache.memory_fraction: {cache.memory_fraction} of the {size_text(memory)} of one {hardware.title}"
    )
    left = int(cache.memory_fraction * memory) - taken
    if left <= 0:
        raise DoesNotFitError(f"{share} is less than {what} take")
    return Budget(left, f"{share} leaves {size_text(left)} beside {what}, which", is_limit=False)


def gpu_budget(config: EngineConfig, taken: int, what: str) -> Budget:
    """Of the GPU at hand, of which each rank has one, where `what` is going to have `taken` bytes: a share of
    all its memory, less what others have of it now. DoesNotFitError if nothing is left."""
    cache, gpu = config.cache, gpus.find_gpu()
    assert gpu is not None
    if cache.memory_bytes is not None:
        source = f"cache.memory_bytes: {size_text(cache.memory_bytes)}"
        if taken + cache.memory_bytes > gpu.free_bytes:
            raise DoesNotFitError(
                f"{source}, beside {what}, is more than the {size_text(gpu.free_bytes)} that {gpu.name} has "
                "free",
                room=max(0, gpu.free_bytes - taken),
            )
        return Budget(cache.memory_bytes, source, is_limit=False)
    used = gpu.total_bytes - gpu.free_bytes
    share = (
        f"cache.memory_fraction: {cache.memory_fraction} of the {size_text(gpu.total_bytes)} of {gpu.name}"
    )
    left = int(cache.memory_fraction * gpu.total_bytes) - used - taken
    if left <= 0:
        raise DoesNotFitError(f"{share} is less than {what} take, beside {size_text(used)} in use")
    source = f"{share} leaves {size_text(left)} beside {what} and {size_text(used)} in use, which"
    return Budget(left, source, is_limit=True)


def _smallest_size(is_enough: Callable[[int], bool]) -> str:
    """About the least number of bytes that is enough, as text that reads back as a number that is."""
    enough = 1
    while not is_enough(enough):
        enough *= 2
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    unit, num_bytes = next(
        (unit, num_bytes) for unit, num_bytes in reversed(UNITS.items()) if num_bytes <= enough
    )
    tenths = math.ceil(enough * 10 / num_bytes)
    while not is_enough(int(tenths / 10 * num_bytes)):  # what is read back is rounded down
        tenths += 1
    return f"{tenths / 10:.1f} {unit}"


def total_memory() -> int:
    """Bytes that this process could take at most: the machine's, or its control group's limit."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit ("max")
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def available_memory() -> int:
    """Bytes that this process may still take: the machine's, or what its control group or a limit on its
    addresses leaves."""
    available = int(psutil.virtual_memory().available)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        available = min(available, limit - psutil.Process().memory_info().vms)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):  # no control group, or no limit ("max")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # cached pages of files count as used, but make room when it is needed
        available = min(available, limit - used + int(stat["inactive_file"]))
    return max(available, 0)
