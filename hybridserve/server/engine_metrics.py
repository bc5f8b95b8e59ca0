"""The engine's numbers, as `AsyncLLM.stats` has them, by the names that dashboards and gateways look for.
Knows numbers, and asks nobody.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

_GAUGES: Mapping[str, tuple[str, str]] = {
    "num_requests_running": ("num_running", "sequences that hold memory"),
    "num_requests_waiting": ("num_waiting", "in the queue: prompts, and sequences that gave memory up"),
    "kv_cache_usage_perc": (
        "cache_utilisation",
        "share of the arena that sequences hold, 0 to 1; what is only kept for later prompts is not counted",
    ),
    "kv_blocks_used": ("num_live_blocks", "blocks of KV that sequences hold"),
    "state_slots_used": ("num_live_slots", "slots of recurrent state that sequences hold"),
    "kv_blocks_cached": ("cache_num_cached_blocks", "blocks of KV that are only kept for later prompts"),
    "state_checkpoints": ("cache_num_checkpoints", "slots that keep a state for later prompts"),
    "num_swapped_out": ("num_swapped_out", "sequences whose memory is on the host now"),
    "kernel_threads": ("num_threads", "threads of a kernel on a CPU: fewer while others keep cores busy"),
    "grammars_cached": ("num_cached_grammars", "grammars that are kept compiled"),
    "grammars_cached_bytes": ("cached_grammar_bytes", "length of their descriptions"),
    "num_requests_waiting_for_grammar": ("num_waiting_for_grammar", "requests whose grammar is compiled now"),
    "adapters": ("num_adapters", "adapters that may be named"),
    "adapter_slots_used": ("num_adapters_on_device", "adapters on the device"),
    "adapters_on_host": ("num_adapters_on_host", "adapters in host memory"),
    "adapter_device_bytes": ("adapter_device_bytes", "device memory that adapters take"),
    "adapter_host_bytes": ("adapter_host_bytes", "host memory that adapters take"),
}
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "steps": ("num_steps", "steps of the engine"),
    "computed_tokens": ("num_computed_tokens", "tokens that went through the model"),
    "generation_tokens": ("num_generated_tokens", "tokens that were drawn"),
    "engine_requests": ("num_requests", "prompts that the engine took"),
    "num_preemptions": ("num_preemptions", "sequences that gave their memory up for others"),
    "prefix_cache_queries": ("prefix_num_queried_tokens", "prompt tokens that were looked for"),
    "prefix_cache_hits": ("prefix_num_hit_tokens", "prompt tokens that need not be computed again"),
    "prefix_cache_hit_requests": ("prefix_num_hits", "prompts that began with what had been computed"),
    "prefix_cache_resumed_tokens": (
        "prefix_num_resumed_tokens",
        "tokens that sequences found which began again, or which could not fork",
    ),
    "prefix_cache_waits": ("prefix_num_waits", "requests that waited for what another was computing"),
    "prefix_cache_waits_given_up": ("prefix_num_waits_given_up", "of them, those that waited in vain"),
    "prefix_cache_evicted_blocks": ("prefix_num_evicted_blocks", "kept blocks of KV that made room"),
    "state_checkpoints_taken": ("prefix_num_checkpoints", "states that were kept"),
    "state_checkpoints_skipped": ("prefix_num_skipped_checkpoints", "states not kept for want of memory"),
    "state_checkpoints_evicted": (
        "prefix_num_vanished_checkpoints",
        "kept states that made room and are gone",
    ),
    "state_checkpoints_over_limit": (
        "prefix_num_over_limit_checkpoints",
        "kept states that went because their path had too many",
    ),
    "state_checkpoints_replaced": (
        "prefix_num_replaced_checkpoints",
        "kept states that a newer one of the same sequence took the place of",
    ),
    "swaps_out": ("num_swaps_out", "sequences whose memory was copied to the host"),
    "swaps_in": ("num_swaps_in", "sequences whose memory was copied back"),
    "swap_bytes": ("num_swap_bytes", "bytes of sequences that were copied to the host or back"),
    "recomputed_instead_of_swapped": (
        "num_recomputed_instead",
        "sequences computed again, as the host had no room or their copies were part of that very step",
    ),
    "compacted_slabs": ("num_compacted_slabs", "slabs that were emptied so that they could change their use"),
    "compaction_bytes": ("num_moved_bytes", "bytes of live blocks and states that moved for it"),
    "nonfinite_logits": ("num_not_finite", "sequences that ended as their logits held NaN or infinity"),
    "grammar_compiles": ("num_compiled_grammars", "grammars that were compiled"),
    "grammar_compile_failures": ("num_failed_grammars", "grammars that could not be"),
    "grammar_compile_seconds": ("grammar_compile_seconds", "time that compiling took"),
    "grammar_cache_hits": ("num_grammar_hits", "requests whose grammar was compiled before"),
    "adapter_loads": ("num_adapter_loads", "adapters that were brought to the device"),
    "adapter_load_failures": ("num_failed_adapter_loads", "adapters that could not be"),
    "adapter_evictions": ("num_adapter_evictions", "adapters that made room for others"),
    "adapter_load_seconds": ("adapter_load_seconds", "time that loads of adapters took"),
}
"""Name -> (the engine's name, help)."""
_PHASES = ("schedule", "build", "forward", "sample", "update")


def counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"hybridserve_{name}", about, value=value)


def gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"hybridserve_{name}", about, value=value)


def labelled(name: str, about: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(f"hybridserve_{name}", about, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key if isinstance(key, tuple) else [key], value)
    return family


def of_engine(
    stats: Mapping[str, Any] | None, plan: Mapping[str, Any] | None, max_loras: int, step_seconds: float
) -> Iterator[Metric]:
    yield gauge("engine_up", "whether the engine answers", int(stats is not None))
    yield gauge("step_running_seconds", "how long the step that runs now has been running", step_seconds)
    if plan is not None:
        yield _config_info(plan)
    if stats is None:
        return
    stats = {**stats, **_live(stats)}
    for name, (key, about) in _GAUGES.items():
        if key in stats:
            yield gauge(name, about, stats[key])
    for name, (key, about) in _COUNTERS.items():
        if key in stats:
            yield counter(name, about, stats[key])
    seconds = {phase: stats[f"{phase}_seconds"] for phase in _PHASES if f"{phase}_seconds" in stats}
    yield labelled("step_seconds", "where the time of steps went", ["phase"], seconds)
    yield from _slabs(stats)
    yield from _cache(stats)
    yield from _adapters(stats, max_loras)


_LIMITS = ("max_num_seqs", "max_model_len", "prefix_caching", "checkpoint_interval")


def _config_info(plan: Mapping[str, Any]) -> Metric:
    sizes = (
        "block_size",
        "prefix_caching",
        "checkpoint_interval",
        "num_slabs",
        "slab_bytes",
        "blocks_per_slab",
        "slots_per_slab",
    )
    values = {key: str(plan[key]) for key in (*sizes, *_LIMITS) if key in plan}
    if {"num_slabs", "blocks_per_slab"} <= plan.keys():  # as gateways know it: all memory as blocks
        values["num_gpu_blocks"] = str((plan["num_slabs"] - 1) * plan["blocks_per_slab"])
    return InfoMetricFamily("hybridserve_cache_config", "how the arena is cut", value=values)


def _slabs(stats: Mapping[str, Any]) -> Iterator[Metric]:
    family = GaugeMetricFamily("hybridserve_slabs", "slabs of the arena by what they hold", labels=["kind"])
    kv, state = stats.get("cache_num_block_slabs", 0), stats.get("cache_num_slot_slabs", 0)
    for kind, count in (
        ("kv", kv),
        ("state", state),
        ("free", stats.get("cache_num_usable_slabs", 0) - kv - state),
    ):
        family.add_metric([kind], count)
    yield family


def _live(stats: Mapping[str, Any]) -> dict[str, float]:
    """What sequences hold, without what is only kept for later ones."""
    kept = {"blocks": "cache_num_cached_blocks", "slots": "cache_num_checkpoints"}
    return {
        f"num_live_{kind}": stats[f"cache_num_{kind}"] - stats[key]
        for kind, key in kept.items()
        if f"cache_num_{kind}" in stats
    }


def _cache(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """The engine's numbers by kind or cause: what follows these beginnings of their names."""
    for name, prefix, label, about, family in _FAMILIES:
        values = {key.removeprefix(prefix): value for key, value in stats.items() if key.startswith(prefix)}
        if values:
            metric = family(f"hybridserve_{name}", about, labels=[label])
            for value, number in sorted(values.items()):
                metric.add_metric([value], number)
            yield metric


_FAMILIES: tuple[tuple[str, str, str, str, type[CounterMetricFamily | GaugeMetricFamily]], ...] = (
    (
        "prefix_cache_hit_tokens",
        "prefix_num_hit_tokens_",
        "cause",
        "prompt tokens that were not computed, by why the state where they end had been kept",
        CounterMetricFamily,
    ),
    (
        "prefix_cache_missed_tokens",
        "prefix_num_missed_tokens_",
        "cause",
        "prompt tokens that were computed, by why they had to be",
        CounterMetricFamily,
    ),
    ("cache_bytes", "cache_bytes_", "kind", "bytes of the arena, by what they hold", GaugeMetricFamily),
    ("host_cache_bytes", "host_bytes_", "kind", "bytes of the host's cache memory", GaugeMetricFamily),
    (
        "prefix_cache_spilled",
        "prefix_num_spilled_",
        "unit",
        "kept blocks and states that went from the arena to the host",
        CounterMetricFamily,
    ),
    (
        "prefix_cache_found_on_host",
        "prefix_num_found_",
        "unit",
        "of them, those that prompts began with",
        CounterMetricFamily,
    ),
    (
        "prefix_cache_vanished",
        "prefix_num_vanished_",
        "unit",
        "kept blocks and states that are neither in the arena nor on the host any more",
        CounterMetricFamily,
    ),
)


def _adapters(stats: Mapping[str, Any], max_loras: int) -> Iterator[Metric]:
    """The engine names few enough adapters, and counts the others together."""
    if "adapters" not in stats:
        return
    adapters: Mapping[str, Mapping[str, float]] = stats["adapters"]
    yield gauge("adapter_slots", "adapters that fit on the device, at most", max_loras)
    for key, (name, about) in _ADAPTER_COUNTERS.items():
        values = {adapter: counters[key] for adapter, counters in adapters.items()}
        yield labelled(name, about, ["adapter"], values)
    for key in ("running", "waiting"):
        family = GaugeMetricFamily(
            f"hybridserve_adapter_sequences_{key}", f"sequences that are {key}", labels=["adapter"]
        )
        for adapter, counters in sorted(adapters.items()):
            family.add_metric([adapter], counters[f"num_{key}"])
        yield family
    yield _lora_info(adapters, max_loras)


_ADAPTER_COUNTERS: Mapping[str, tuple[str, str]] = {
    "num_finished": ("adapter_sequences_finished", "sequences that have ended"),
    "num_computed_tokens": ("adapter_computed_tokens", "tokens that went through the model"),
    "num_generated_tokens": ("adapter_generation_tokens", "tokens that were drawn"),
}


def _lora_info(adapters: Mapping[str, Mapping[str, float]], max_loras: int) -> Metric:
    """What gateways that route by adapter read."""

    def names(key: str) -> str:
        named = [name for name, counters in adapters.items() if counters[key] and not name.startswith("(")]
        return ",".join(sorted(named))

    labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    family = GaugeMetricFamily("hybridserve_lora_requests_info", "adapters with sequences", labels=labels)
    family.add_metric([str(max_loras), names("num_running"), names("num_waiting")], time.time())
    return family
