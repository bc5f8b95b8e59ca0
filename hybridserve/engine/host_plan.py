"""The host's memory beside the arena: how much, and what a sequence that gives way does with it.

Knows sizes and speeds; knows no request, and allocates nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from hybridserve.engine import arena_plan
from hybridserve.engine.arena_plan import DoesNotFitError
from hybridserve.engine.hardware import num_ranks_here
from hybridserve.engine.roofline import COMPUTE_SHARE
from hybridserve.engine.units import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.config.schema import EngineConfig
    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.engine.hardware import Hardware
    from hybridserve.engine.roofline import StageCost

AUTO_BYTES = 4 << 30
"""Of a rank, at most, where the configuration leaves it open."""

AUTO_SHARE = 1 / 2
"""Of what weights and arenas leave free: something is to be left for what is computed."""

LEAST_SLABS = 2
"""One for blocks and one for slots: with less, no sequence of a hybrid could be swapped out."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Host memory of each rank, in slabs as the arena's are."""

    num_slabs: int
    """Slab 0, which is never handed out and has no bytes, included; 0: there is no host memory."""
    num_bytes: int
    """Of the rank that takes most."""
    preemption: Literal["auto", "swap", "recompute"]
    swap_bytes_per_token: int
    """Bytes whose way to the host and back takes as long as computing one token: an estimate."""
    reason: str
    """Why it is none, or less than was thought of; may be empty."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def row(self, *, several_ranks: bool) -> tuple[str, str]:
        """For `EnginePlan.table`."""
        if not self.num_slabs:
            return "host", f"no memory for swapped sequences and evicted prefixes ({self.reason})"
        a_rank = " a rank" if several_ranks else ""
        why = f" ({self.reason})" if self.reason else ""
        return (
            "host",
            f"{size_text(self.num_bytes)} of its memory{a_rank}{why} for swapped sequences and evicted "
            f"prefixes; preemption {self.preemption}",
        )


def plan_host(
    config: EngineConfig,
    hardware: Hardware,
    layouts: Sequence[CacheLayout],
    costs: Sequence[StageCost],
    weight_bytes: int,
) -> HostPlan:
    """`layouts` and `costs` are those of one rank of each stage, `weight_bytes` of all ranks. ValueError,
    naming the key, where this machine has not what is set, or where sequences are to be swapped to nowhere.
    """
    slab_bytes = max(layout.slab_bytes for layout in layouts)
    num_bytes, reason = _num_bytes(config, hardware, layouts, weight_bytes)
    num_slabs = num_bytes // slab_bytes
    if num_slabs < LEAST_SLABS:
        if num_bytes:
            reason = f"{size_text(num_bytes)} are less than {LEAST_SLABS} slabs of {size_text(slab_bytes)}"
        num_slabs = 0
    preemption = config.scheduler.preemption
    if preemption == "swap" and not num_slabs:
        raise ValueError(
            f"scheduler.preemption: swap needs host memory, and there is none ({reason}): set "
            f"cache.host_swap_bytes to {size_text(LEAST_SLABS * slab_bytes)} or more"
        )
    return HostPlan(
        num_slabs=num_slabs + 1 if num_slabs else 0,
        num_bytes=num_slabs * slab_bytes,
        preemption=preemption,
        swap_bytes_per_token=_swap_bytes_per_token(hardware, costs, config.parallel.tensor),
        reason=reason,
    )


def _num_bytes(
    config: EngineConfig, hardware: Hardware, layouts: Sequence[CacheLayout], weight_bytes: int
) -> tuple[int, str]:
    """Of each rank, and what is to be said of that."""
    wanted = config.cache.host_swap_bytes
    if wanted == 0:
        return 0, "cache.host_swap_bytes is 0"
    if config.scheduler.preemption == "recompute" and not config.cache.prefix_caching:
        return 0, "scheduler.preemption is recompute, and prefixes are not kept"
    if not hardware.is_here:  # nor is its host
        return (AUTO_BYTES, "at most") if wanted == "auto" else (wanted, "")
    num_here = num_ranks_here(config)
    arena = weights = 0  # of the host's memory, where they are on a GPU
    if hardware.device == "cpu":
        arena = max(layout.num_slabs * layout.slab_bytes for layout in layouts)
        weights = weight_bytes * num_here // config.parallel.num_ranks
    is_pinned = hardware.device != "cpu"
    if wanted != "auto":
        total = arena_plan.total_memory()
        taken = _pinned_bytes(wanted) if is_pinned else wanted
        if weights + (arena + taken) * num_here > total:
            times = f" x {num_here} ranks" if num_here > 1 else ""
            pinned = f", {size_text(taken)} where it is pinned" if taken > wanted else ""
            raise DoesNotFitError(
                f"cache.host_swap_bytes: {size_text(wanted)}{times}{pinned}, beside "
                f"{size_text(weights)} of weights and {size_text(arena)}{times} of arena, is more than the "
                f"{size_text(total)} of memory that this machine has",
                key="cache.host_swap_bytes",
                room=(total - weights) // num_here - arena,
            )
        return wanted, ""
    left = (arena_plan.available_memory() - weights) // num_here - arena
    if left <= 0:
        return 0, "weights and arena leave no memory free"
    fitting = int(left * AUTO_SHARE)
    if is_pinned:
        fitting = _pinned_bytes(fitting + 1) // 2
    if fitting >= AUTO_BYTES:
        return AUTO_BYTES, "at most"
    return fitting, f"at most: half of the {size_text(left)} that weights and arena leave free"


def _pinned_bytes(num_bytes: int) -> int:
    """What torch takes of a machine for pinned memory of this size: the next power of two."""
    return 1 << max(num_bytes - 1, 0).bit_length()


def _swap_bytes_per_token(hardware: Hardware, costs: Sequence[StageCost], ranks: int) -> int:
    """Ranks copy at the same time, stages one after the other; prompts are computed at the speed of large
    products. CPU ranks share one machine's cores and its memory alike, so the ratio is that of one."""
    operations = sum(2 * cost.active_parameters / ranks for cost in costs)
    seconds = operations / (COMPUTE_SHARE * hardware.flops)
    return int(seconds * hardware.host_bandwidth / 2 / len(costs))
