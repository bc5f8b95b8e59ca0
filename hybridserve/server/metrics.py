"""What `/metrics` shows, in Prometheus' text format; every name begins with `hybridserve_`.

Counts requests as clients see them, and turns the numbers of `AsyncLLM.stats` into the names that dashboards
and gateways of such servers look for. Lives in the event loop, so that nothing here needs a lock.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from hybridserve.server import tracing
from hybridserve.server.security import route_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from hybridserve.engine.messages import RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "(other)"
"""All paths that are not served."""

_SECONDS = tuple(step * 10.0**power for power in range(-3, 3) for step in (1, 2.5, 5))
_TOKENS = tuple(2**power for power in range(21))
_FEW = (1, 2, 5, 10, 20, 50, 128)
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("from arrival to the first token", _SECONDS),
    "inter_token_latency_seconds": ("between pieces of one continuation", _SECONDS),
    "e2e_request_latency_seconds": ("from arrival to the last token, or until it was cut short", _SECONDS),
    "request_queue_time_seconds": ("from arrival to the first step", _SECONDS),
    "request_prefill_time_seconds": ("from the first step to the first token", _SECONDS),
    "request_decode_time_seconds": ("from the first to the last token", _SECONDS),
    "request_prompt_tokens": ("tokens of a request's prompt", _TOKENS),
    "request_generation_tokens": ("tokens that were generated for a request", _TOKENS),
    "request_params_n": ("continuations that were asked for", _FEW),
    "request_params_max_tokens": ("tokens that were asked for at most", _TOKENS),
}
_GAUGES: Mapping[str, tuple[str, str]] = {
    "num_requests_running": ("num_running", "sequences that hold memory"),
    "num_requests_waiting": ("num_waiting", "in the queue: prompts, and sequences that gave memory up"),
    "kv_cache_usage_perc": (
        "cache_utilisation",
        "share of the arena that sequences hold, 0 to 1; what is only kept for later prompts is not counted",
    ),
    "kv_blocks_used": ("cache_num_blocks", "blocks of KV in use"),
    "state_slots_used": ("cache_num_slots", "slots of recurrent state in use"),
    "kv_blocks_cached": ("cache_num_cached_blocks", "of them, blocks that are only kept for later prompts"),
    "state_checkpoints": ("cache_num_checkpoints", "slots that keep a state for later prompts"),
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
    "prefix_waits": ("prefix_num_waits", "requests that waited for what another was computing"),
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
_SERVER_GAUGES: Mapping[str, str] = {
    "ready": "whether requests are served",
    "start_time_seconds": "when the server started, in seconds since 1970",
    "server_sequences": "sequences that were accepted and have not ended",
    "server_sequences_max": "the most that are accepted: max_queue and max_num_seqs",
}
_PHASES = ("schedule", "build", "forward", "sample", "update")


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def total(self) -> tuple[int, float]:
        return sum(self._counts), self._sum

    def family(self, name: str, about: str) -> HistogramMetricFamily:
        labels = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(labels, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(name, about, buckets=buckets, sum_value=self._sum)


class ServerMetrics:
    """Counters and histograms since the start."""

    def __init__(self) -> None:
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._responses: Counter[tuple[str, str]] = Counter()
        self._rejections: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._ignored: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_corrupted = 0
        self.observe_gap = self._histograms["inter_token_latency_seconds"].observe

    def respond(self, path: str, status: int) -> None:
        self._responses[route_of(path) or OTHER, str(status)] += 1

    def reject(self, reason: str) -> None:
        """A request for which there was no room."""
        self._rejections[reason] += 1

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that were accepted without effect: of a list, so that they are few."""
        self._ignored.update(names)

    def take(self, num_prompt_tokens: int, n: int, max_tokens: int) -> None:
        """The engine has taken a prompt; whoever asked may have left."""
        self._num_prompt_tokens += num_prompt_tokens
        self._observe("request_prompt_tokens", num_prompt_tokens)
        self._observe("request_params_n", n)
        self._observe("request_params_max_tokens", max_tokens)

    def finish_sequences(self, reason: str, count: int) -> None:
        """stop, length, abort (its client left, or the deadline passed), error, or refused by the engine."""
        if count:
            self._finished[reason] += count
            if (span := tracing.current.get()) is not None:
                span.finish_sequences(reason)

    def corrupt(self) -> None:
        """The engine gave a sequence up."""
        self._num_corrupted += 1

    def finish(self, times: RequestMetrics, num_generated: int) -> None:
        """A prompt of which the engine has nothing more to say."""
        self._observe("request_generation_tokens", num_generated)
        self._observe("e2e_request_latency_seconds", times.finished - times.arrival)
        if times.first_scheduled is not None:
            self._observe("request_queue_time_seconds", times.first_scheduled - times.arrival)
        if times.first_token is not None:
            self._observe("time_to_first_token_seconds", times.first_token - times.arrival)
            self._observe("request_decode_time_seconds", times.finished - times.first_token)
            if times.first_scheduled is not None:
                self._observe("request_prefill_time_seconds", times.first_token - times.first_scheduled)
        if (span := tracing.current.get()) is not None:
            span.finish(times, num_generated)

    def cut(self, seconds: float, seconds_to_first: float | None, num_generated: int) -> None:
        """A prompt that the engine took and did not bring to its end, as its client left, its deadline passed
        or the engine failed, after so many seconds. Without these, latencies look best when nobody gets an
        answer in time."""
        self._observe("request_generation_tokens", num_generated)
        self._observe("e2e_request_latency_seconds", seconds)
        if seconds_to_first is not None:
            self._observe("time_to_first_token_seconds", seconds_to_first)

    def total(self, name: str) -> tuple[int, float]:
        """How often something was measured, and the sum."""
        return self._histograms[name].total()

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def render(
        self,
        stats: Mapping[str, Any] | None,
        plan: Mapping[str, Any] | None,
        max_loras: int,
        step_seconds: float,
        gauges: Mapping[str, float],
        startup: Mapping[str, float],
    ) -> bytes:
        """The page. `stats` None: the engine can't be asked now, and its numbers are left out. `gauges` are
        the server's, `startup` the seconds of each part of starting up."""
        registry = CollectorRegistry(auto_describe=False)
        families = [*self._own(gauges, startup), *_of_engine(stats, plan, max_loras, step_seconds)]
        registry.register(_Families(families))
        return generate_latest(registry)

    def _own(self, gauges: Mapping[str, float], startup: Mapping[str, float]) -> Iterator[Metric]:
        for name, about in _SERVER_GAUGES.items():
            yield _gauge(name, about, gauges[name])
        phases = GaugeMetricFamily(
            "hybridserve_startup_seconds", "how long each part of starting up took", labels=["phase"]
        )
        for phase, seconds in startup.items():
            phases.add_metric([phase], seconds)
        yield phases
        for name, (about, _) in _HISTOGRAMS.items():
            yield self._histograms[name].family(f"hybridserve_{name}", about)
        yield _counter("prompt_tokens", "tokens of prompts that the engine took", self._num_prompt_tokens)
        yield _counter("corrupted_requests", "sequences that the engine gave up", self._num_corrupted)
        yield _labelled("request_success", "sequences that have ended", ["finished_reason"], self._finished)
        yield _labelled("admission_rejections", "requests that found no room", ["reason"], self._rejections)
        yield _labelled("ignored_fields", "fields accepted without effect", ["field"], self._ignored)
        yield _labelled("http_responses", "responses begun", ["path", "status"], self._responses)


class _Families:
    """What prometheus_client collects from."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"hybridserve_{name}", about, value=value)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"hybridserve_{name}", about, value=value)


def _labelled(name: str, about: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(f"hybridserve_{name}", about, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key if isinstance(key, tuple) else [key], value)
    return family


def _of_engine(
    stats: Mapping[str, Any] | None, plan: Mapping[str, Any] | None, max_loras: int, step_seconds: float
) -> Iterator[Metric]:
    yield _gauge("engine_up", "whether the engine answers", int(stats is not None))
    yield _gauge("step_running_seconds", "how long the step that runs now has been running", step_seconds)
    if plan is not None:
        yield _config_info(plan)
    if stats is None:
        return
    for name, (key, about) in _GAUGES.items():
        if key in stats:
            yield _gauge(name, about, stats[key])
    for name, (key, about) in _COUNTERS.items():
        if key in stats:
            yield _counter(name, about, stats[key])
    seconds = {phase: stats[f"{phase}_seconds"] for phase in _PHASES if f"{phase}_seconds" in stats}
    yield _labelled("step_seconds", "where the time of steps went", ["phase"], seconds)
    yield from _slabs(stats)
    yield from _adapters(stats, max_loras)


def _config_info(plan: Mapping[str, Any]) -> Metric:
    sizes = ("block_size", "num_slabs", "slab_bytes", "blocks_per_slab", "slots_per_slab")
    values = {key: str(plan[key]) for key in (*sizes, "max_num_seqs", "max_model_len") if key in plan}
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


def _adapters(stats: Mapping[str, Any], max_loras: int) -> Iterator[Metric]:
    """The engine names few enough adapters, and counts the others together."""
    if "adapters" not in stats:
        return
    adapters: Mapping[str, Mapping[str, float]] = stats["adapters"]
    yield _gauge("adapter_slots", "adapters that fit on the device, at most", max_loras)
    for key, (name, about) in _ADAPTER_COUNTERS.items():
        values = {adapter: counters[key] for adapter, counters in adapters.items()}
        yield _labelled(name, about, ["adapter"], values)
    for key in ("running", "waiting"):
        gauge = GaugeMetricFamily(
            f"hybridserve_adapter_sequences_{key}", f"sequences that are {key}", labels=["adapter"]
        )
        for adapter, counters in sorted(adapters.items()):
            gauge.add_metric([adapter], counters[f"num_{key}"])
        yield gauge
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
