"""What an engine counts. Knows numbers; does not know what happens to a request."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridserve.core.prefix_store import PrefixCounters
    from hybridserve.core.scheduler import Scheduler


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and where the time of steps went (seconds).

    A request has `params.n` sequences, and has finished when the last of them has.
    """

    num_steps: int = 0
    num_requests: int = 0
    num_finished_requests: int = 0
    num_finished_sequences: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_not_finite: int = 0
    """Sequences that ended since their logits held NaN or infinity."""
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("schedule", "build", "forward", "sample", "update"), 0.0)
    )

    def gauges(self, scheduler: Scheduler) -> dict[str, float]:
        """One number each: these counters, and how things stand with the scheduler and its memory."""
        usage = scheduler.cache.usage()
        return {
            "num_steps": self.num_steps,
            "num_requests": self.num_requests,
            "num_finished_requests": self.num_finished_requests,
            "num_finished_sequences": self.num_finished_sequences,
            "num_computed_tokens": self.num_computed_tokens,
            "num_generated_tokens": self.num_generated_tokens,
            "num_not_finite": self.num_not_finite,
            "num_preemptions": scheduler.counters.num_preemptions,
            "num_swaps_out": scheduler.counters.num_swaps_out,
            "num_swaps_in": scheduler.counters.num_swaps_in,
            "num_swap_bytes": scheduler.counters.num_swap_bytes,
            "num_recomputed_instead": scheduler.counters.num_recomputed_instead,
            "num_swapped_out": scheduler.cache.host.num_sequences,
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            **{f"{phase}_seconds": seconds for phase, seconds in self.seconds.items()},
            **{f"cache_{name}": value for name, value in usage._asdict().items()},
            "cache_utilisation": usage.utilisation,
            **{f"cache_bytes_{kind}": size for kind, size in scheduler.cache.bytes_by_kind().items()},
            **asdict(scheduler.cache.compactor.counters),
            **{f"host_bytes_{kind}": size for kind, size in scheduler.cache.host.bytes_by_kind().items()},
            **_of_prefixes(scheduler.cache.prefix.counters),
        }


def _of_prefixes(counters: PrefixCounters) -> dict[str, float]:
    numbers = asdict(counters)
    hits, misses = numbers.pop("hit_tokens"), numbers.pop("missed_tokens")
    return {
        "prefix_num_hit_tokens": sum(hits.values()),
        **{f"prefix_num_hit_tokens_{cause}": count for cause, count in hits.items()},
        **{f"prefix_num_missed_tokens_{cause}": count for cause, count in misses.items()},
        **{f"prefix_{name}": value for name, value in numbers.items()},
    }
