"""An engine without a model: a scheduler, memory as Python dicts, and tokens that depend on all that came
before.

A step really reads and writes the blocks and slots that it names, and computes with what is in the adapter
slots then, so a request that is given somebody else's memory or adapter, a state twice advanced or a stale
slot draws other tokens than it would alone.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from hybridserve.core.adapter_slots import AdapterSlots
from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec, StateSpec, StateTensor
from hybridserve.core.request import FinishReason, Request, SamplingParams
from hybridserve.core.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler
from tests.harness.symbolic_arena import SymbolicArena

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hybridserve.core.adapter_slots import AdapterLoad
    from hybridserve.core.live_requests import TokenEvent
    from hybridserve.core.step import ScheduledSequence, ScheduledStep

VOCAB = 31
EOS = 0


def fold(tokens: Sequence[int], state: int = 0) -> int:
    """The recurrent state after `tokens`."""
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (2**61 - 1)
    return state


def draw(state: int, index: int, num_output: int, params: SamplingParams) -> int:
    token = (state * 7919 + index * 104_729) % 1_000_000_007 % VOCAB
    return 1 if token == EOS and num_output < params.min_tokens else token


def adapted(
    tokens: Sequence[int], adapter_id: str | None, adapter_start: int, position: int = 0
) -> list[int]:
    """What tokens from `position` on leave behind: their ids, changed from `adapter_start` on."""
    shift = VOCAB * (1 + fold(adapter_id.encode())) if adapter_id is not None else 0
    return [token + shift * (at >= adapter_start) for at, token in enumerate(tokens, start=position)]


def alone(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    index: int,
    max_model_len: int,
    adapter_id: str | None = None,
    adapter_start: int = 0,
) -> list[int]:
    """What a request generates when nobody else is there."""
    tokens, outputs = list(prompt_ids), []
    while len(outputs) < params.max_tokens and len(tokens) < max_model_len:
        state = fold(adapted(tokens, adapter_id, adapter_start))
        outputs.append(draw(state, index, len(outputs), params))
        tokens.append(outputs[-1])
        if len(outputs) > params.min_tokens and (
            outputs[-1] in params.stop_token_ids or (outputs[-1] == EOS and not params.ignore_eos)
        ):
            break
    return outputs


def toy_layout(
    num_slabs: int, block_size: int = 4, kind: str = "hybrid", *, slots_per_slab: int = 1
) -> CacheLayout:
    """A toy model of each kind ("hybrid", "kv", "state"); so many slabs, the null slab included.

    With blocks of 4 tokens a hybrid's slab is 1 slot or 4 blocks, or 2 slots or 5 blocks.
    """
    channels = {1: 64, 2: 40}[slots_per_slab]
    kv = PagedKVSpec(num_kv_heads=2, head_dim=16, dtype="float32")
    state = StateSpec(
        (StateTensor("conv", (channels, 3), "float32"), StateTensor("ssm", (channels, 13), "float32"))
    )
    specs = {"hybrid": [state, kv], "kv": [kv], "state": [state]}[kind]
    return dataclasses.replace(CacheLayout.build(specs, block_size, 2**24), num_slabs=num_slabs)


class _Captured(NamedTuple):
    step: ScheduledStep
    requests: dict[str, Request]
    tokens: list[list[int | None]]  # None: drawn by a step that has not finished


class ScriptedEngine:
    """Runs a Scheduler with up to `depth` steps in flight, and checks each step that it plans.

    `num_slots` adapters of `adapter_bytes` each (1 for those that it doesn't name) fit into `device_bytes`. A
    load takes until the next step, or, not `auto_load`, until `finish_load`; it fails for ids in `broken`.
    """

    def __init__(
        self,
        layout: CacheLayout,
        depth: int = 1,
        *,
        num_slots: int = 0,
        device_bytes: int | None = None,
        adapter_bytes: Mapping[str, int] | None = None,
        auto_load: bool = True,
        **limits: object,
    ) -> None:
        if num_slots:
            self.num_bytes = dict(adapter_bytes or {})
            limits["adapters"] = AdapterSlots(num_slots, device_bytes)
            limits["adapter_bytes"] = lambda adapter_id: self.num_bytes.get(adapter_id, 1)
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 64, **limits}
        self.layout, self.depth = layout, depth
        self.scheduler = Scheduler(layout, eos_token_ids=[EOS], check_integrity=True, **options)
        self.num_computed = 0
        self.requests: dict[str, Request] = {}
        self.events: list[TokenEvent] = []
        self.steps: list[ScheduledStep] = []
        self.auto_load = auto_load
        self.broken: set[str] = set()
        self.loading: list[AdapterLoad] = []
        self.loaded: list[str] = []
        self.device: dict[int, tuple[str, int]] = {}  # adapter slot -> (adapter, generation)
        self._flights: deque[_Captured] = deque()
        self.arena = SymbolicArena(layout)
        self._drawn: dict[tuple[Request, int], int] = {}  # (request, position) -> token

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        priority: int = 0,
        *,
        adapter: str | None = None,
        version: int | None = 1,
        adapter_start: int = 0,
        cache_salt: str | None = None,
        **params: object,
    ) -> Request:
        """`version` of an adapter's content; None: the base model, though `adapter` is named."""
        request = Request(request_id, list(prompt), SamplingParams(**params), priority, adapter)
        if adapter is not None and version is not None:
            request.adapter_id, request.adapter_start = f"{adapter}-{version}", adapter_start
        request.cache_salt = cache_salt
        self.scheduler.add(request)
        self.requests[request_id] = request
        return request

    def abort(self, request_id: str) -> list[TokenEvent]:
        events = self.scheduler.abort(request_id)
        self.events += events
        return events

    def step(self) -> ScheduledStep | None:
        """Plan a step; then, if `depth` are in flight or nothing could be planned, finish the oldest."""
        if len(self._flights) == MAX_STEPS_IN_FLIGHT:
            self.finish_step()
        while self.auto_load and self.loading:
            self.finish_load()
        step = self.plan()
        if len(self._flights) >= self.depth or (step is None and self._flights):
            self.finish_step()
        return step

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self._flights and not self.loading:
                return
            self.step()
        raise AssertionError("the work never ends")

    def plan(self) -> ScheduledStep | None:
        step = self.scheduler.schedule()
        self._clear_slots(self.scheduler.adapters.take_dropped())
        for load in self.scheduler.take_loads():
            self._clear_slots(load.evicted)
            assert load.slot not in self.device
            assert load.adapter_id not in [other.adapter_id for other in self.loading], "loaded twice"
            self.loading.append(load)
        if step is None:
            waiting = self.scheduler.waiting_for_adapters
            assert not waiting or self.loading
            assert waiting or self._flights or not self.scheduler.has_work, (
                "nothing runs, nothing is in flight or being loaded, work is left"
            )
            return None
        assert not self.scheduler.waiting_for_adapters
        for sequence in step.sequences:
            for name in sequence.samples:
                self.requests[name] = self.scheduler.requests[name]
        self._check(step)
        requests = {
            sequence.request_id: self.scheduler.requests[sequence.request_id] for sequence in step.sequences
        }
        requests |= {name: self.requests[name] for sequence in step.sequences for name in sequence.samples}
        tokens = []
        for sequence in step.sequences:
            request = requests[sequence.request_id]
            positions = range(sequence.start, sequence.start + sequence.length)
            known = request.prompt_ids + request.output_ids
            tokens.append([known[position] if position < len(known) else None for position in positions])
            assert not (request.params.has_penalties and sequence.samples and None in tokens[-1])
        self._flights.append(_Captured(step, requests, tokens))
        self.num_computed += step.num_tokens
        self.steps.append(step)
        return step

    def finish_load(self, index: int = 0, *, ok: bool = True) -> None:
        load = self.loading.pop(index)
        if not ok or load.adapter_id in self.broken:
            self.events += self.scheduler.adapter_failed(load.adapter_id, "broken")
            return
        assert load.slot not in self.device
        self.device[load.slot] = (load.adapter_id, load.generation)
        self.loaded.append(load.adapter_id)
        slots = self.scheduler.adapters
        assert slots.device_bytes is None or slots.device_bytes >= sum(
            self.num_bytes.get(adapter_id, 1) for adapter_id, _ in self.device.values()
        )
        self.scheduler.adapter_loaded(load.slot)

    def drop(self, adapter_id: str) -> None:
        if (slot := self.scheduler.adapters.drop(adapter_id)) is not None:
            self._clear_slots([slot])

    def restart(self) -> None:
        """The steps in flight are lost."""
        self._flights.clear()
        for request_id in self.scheduler.restart():
            del self.requests[request_id]
        self._clear_slots(self.scheduler.adapters.take_dropped())

    def _clear_slots(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.device.pop(slot, None)

    def finish_step(self) -> list[TokenEvent]:
        step, requests, tokens = self._flights.popleft()
        self.arena.begin(step)
        sampled: dict[str, int] = {}
        for sequence, chunk in zip(step.sequences, tokens, strict=True):
            state = self._compute(sequence, requests[sequence.request_id], chunk)
            for name in sequence.samples:
                request, end = requests[name], sequence.start + sequence.length
                token = draw(state, request.index, end - request.num_prompt, request.params)
                sampled[name] = self._drawn[request, end] = token
        self.arena.end(step)
        events = self.scheduler.update(step.step_id, sampled)
        self._clear_slots(self.scheduler.adapters.take_dropped())
        self.events += events
        return events

    def _compute(self, sequence: ScheduledSequence, request: Request, chunk: list[int | None]) -> int:
        """Run one sequence's tokens; returns what its draws depend on."""
        start = sequence.start
        known = request.prompt_ids + request.output_ids
        ids = [
            self._drawn[request, position] if position >= len(known) else known[position]
            for position in range(start)
        ]
        ids += [
            self._drawn[request, position] if token is None else token
            for position, token in enumerate(chunk, start=start)
        ]
        adapter_id = None
        if sequence.adapter_slot:
            adapter_id, _ = self.device[sequence.adapter_slot]
        history = adapted(ids, adapter_id, sequence.adapter_start)
        self.arena.compute(sequence, history)
        return fold(history)

    def _check(self, step: ScheduledStep) -> None:
        assert 0 < step.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(step.sequences) <= self.scheduler.max_num_seqs
        used = {sequence.adapter_slot for sequence in step.sequences} - {0}
        assert step.adapter_generations == tuple((slot, self.device[slot][1]) for slot in sorted(used))
        assert len(used) <= self.scheduler.adapters.num_slots
        written = self._written(step)
        units = [unit for units in written.values() for unit in units]
        assert len(set(units)) == len(units), "two sequences write to the same unit"
        assert ("block", 0) not in units
        assert ("slot", 0) not in units
        moved = {("block", source) for source, _ in step.moves.blocks}
        moved |= {("slot", source) for source, _ in step.moves.slots}
        for flight in self._flights:  # D5: what a step in flight may still write has no new tenant yet
            before = {unit: owner for owner, units in self._written(flight.step).items() for unit in units}
            for name, units in written.items():  # but where this step saves first what is there
                assert all(before.get(unit, name) == name for unit in units - moved), "written in flight"

    def _written(self, step: ScheduledStep) -> dict[str, set[tuple[str, int]]]:
        written: dict[str, set[tuple[str, int]]] = {}
        swapped_in = {copy.destination for copy in step.swaps_in.blocks}
        for sequence in step.sequences:
            end, size = sequence.start + sequence.length, self.layout.block_size
            units: set[tuple[str, int]] = set()
            if self.layout.blocks_per_slab:
                assert len(sequence.block_ids) * size >= end
                first = max(sequence.start, sequence.write_from) // size
                touched = sequence.block_ids[first : -(-end // size)]
                units |= {("block", block) for block in touched}
                units |= {("block", block) for block in sequence.block_ids if block in swapped_in}
            if self.layout.slots_per_slab:
                units.add(("slot", sequence.state_slot))
            written[sequence.request_id] = units
        written["(saves)"] = {("slot", destination) for _, destination in step.state_saves}
        return written

    def check_drained(self) -> None:
        self.scheduler.cache.prefix.clear()
        self.scheduler.check_integrity()
        usage, host = self.scheduler.cache.usage(), self.scheduler.cache.host
        assert (host.slabs.num_free, host.num_sequences) == (host.slabs.num_usable, 0)
        assert (usage.num_blocks, usage.num_slots, usage.num_slabs, usage.num_bytes) == (0, 0, 0, 0)
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert not self.scheduler.waiting_for_adapters
        slots = self.scheduler.adapters
        slots.check_integrity({})
        assert {slots.slot_of(adapter_id) for adapter_id in slots.ready_ids} == set(self.device)
        for counters in self.scheduler.adapter_counters().values():
            assert (counters.num_running, counters.num_waiting) == (0, 0)

    def check_outputs(self) -> None:
        """Each finished request generated what it would have generated alone; each aborted one, the beginning
        of it."""
        for request in self.requests.values():
            expected = alone(
                request.prompt_ids,
                request.params,
                request.index,
                self.scheduler.max_model_len,
                request.adapter_id,
                request.adapter_start,
            )
            if request.finish_reason is FinishReason.ABORT:
                assert request.output_ids == expected[: len(request.output_ids)], request.id
            else:
                assert request.finish_reason is not None, f"{request.id} never finished"
                assert request.output_ids == expected, request.id
            told = [e.token_id for e in self.events if e.request_id == request.id and e.token_id is not None]
            assert told == request.output_ids
            assert [e.request_id for e in self.events if e.finish_reason].count(request.id) == 1
