"""GET /playground/state: the engine at a glance, for a page that asks about once a second.

Counters go on from the start of the server, with the moment at which they were read: whoever asks twice makes
rates of them. Knows what the engine said last; asks it nothing that costs a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hybridserve.engine.messages import RequestView

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hybridserve.engine.messages import EngineView
    from hybridserve.server.exchange import Exchange
    from hybridserve.server.service import Service

ARENA_KINDS = ("kv_live", "state_live", "kv_cached", "checkpoints", "fragmented", "free")
_LATENCIES = ("time_to_first_token", "inter_token_latency")


class Latency(msgspec.Struct, frozen=True):
    """Measured so often, with this sum."""

    count: int
    seconds: float


class AdapterRow(msgspec.Struct, frozen=True):
    """`state`: device, loading, host or disk."""

    name: str
    state: str
    rank: int
    num_running: int
    num_waiting: int
    num_generated_tokens: int


class ArenaState(msgspec.Struct, frozen=True):
    """`slabs` is base64 of one byte a slab: 0 free, 1 KV, 2 state, 3 null; those missing at its end are free.
    Blocks and slots are those in use, for sequences or for later prompts."""

    slabs: bytes
    num_slabs: int
    slab_bytes: int
    blocks_per_slab: int
    slots_per_slab: int
    block_size: int
    num_blocks: int
    num_slots: int
    num_usable_bytes: int
    bytes_by_kind: dict[str, int]
    """What those are used for: kv_live, kv_cached, state_live, checkpoints, fragmented, free."""


class EngineNumbers(msgspec.Struct, frozen=True):
    """`seconds`: the moment, on a clock that starts anywhere. `requests` are the oldest, not always all."""

    seconds: float
    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_steps: int
    num_computed_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_queried_tokens: int
    """Of prompts; `num_hit_tokens` of them were not computed again."""
    num_hit_tokens: int
    first_token: Latency
    between_tokens: Latency
    arena: ArenaState
    requests: list[RequestView]
    adapters: list[AdapterRow]


class PlaygroundState(msgspec.Struct, frozen=True):
    """`engine` is null where there is none to ask."""

    status: str
    model: str
    engine: EngineNumbers | None


async def playground_state(service: Service, exchange: Exchange) -> None:
    """The engine at a glance, as the page at / shows it. Its shape may change with the page."""
    seen = await service.view()
    engine = None if seen is None else _numbers(service, *seen)
    await exchange.reply(PlaygroundState(service.status, service.name, engine))


def _numbers(service: Service, seconds: float, view: EngineView) -> EngineNumbers:
    gauges, plan = view.gauges, service.engine.plan
    latencies = {name: Latency(*service.metrics.total(f"{name}_seconds")) for name in _LATENCIES}
    return EngineNumbers(
        seconds=seconds,
        num_running=gauges.get("num_running", 0),
        num_waiting=gauges.get("num_waiting", 0),
        max_num_seqs=plan["max_num_seqs"],
        num_steps=gauges.get("num_steps", 0),
        num_computed_tokens=gauges.get("num_computed_tokens", 0),
        num_generated_tokens=gauges.get("num_generated_tokens", 0),
        num_preemptions=gauges.get("num_preemptions", 0),
        num_queried_tokens=gauges.get("prefix_num_queried_tokens", 0),
        num_hit_tokens=gauges.get("prefix_num_hit_tokens", 0),
        first_token=latencies["time_to_first_token"],
        between_tokens=latencies["inter_token_latency"],
        arena=ArenaState(
            slabs=view.slabs,
            num_slabs=plan.get("num_slabs", len(view.slabs)),
            slab_bytes=plan.get("slab_bytes", 0),
            blocks_per_slab=plan.get("blocks_per_slab", 0),
            slots_per_slab=plan.get("slots_per_slab", 0),
            block_size=plan.get("block_size", 0),
            num_blocks=gauges.get("cache_num_blocks", 0),
            num_slots=gauges.get("cache_num_slots", 0),
            num_usable_bytes=gauges.get("cache_num_usable_bytes", 0),
            bytes_by_kind={kind: gauges.get(f"cache_bytes_{kind}", 0) for kind in ARENA_KINDS},
        ),
        requests=view.requests,
        adapters=list(_rows(view)),
    )


def _rows(view: EngineView) -> Iterable[AdapterRow]:
    counted: Mapping[str, Mapping[str, Any]] = view.gauges.get("adapters", {})
    for adapter in view.adapters:
        counters = counted.get(adapter.name, {})
        yield AdapterRow(
            adapter.name,
            adapter.state,
            adapter.rank,
            counters.get("num_running", 0),
            counters.get("num_waiting", 0),
            counters.get("num_generated_tokens", 0),
        )
