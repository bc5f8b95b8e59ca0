"""An engine core with every guard of the invariance tests on, and the oracle that it is held against.

The guards: free units are poisoned the moment they become free, or, while there are copies that read the
arena as the next step finds it, right after these; the null slab before every step. After a step every byte
of the arena and of the host's memory that the step does not own must be what it was; integrity is checked
after every step; at the end all memory must be back.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hybridserve.config.loader import load_config
from hybridserve.core.cache_spec import StateSpec
from hybridserve.core.request import Request, RequestStatus, SamplingParams
from hybridserve.core.slabs import SlabKind
from hybridserve.core.step import ScheduledSequence
from hybridserve.engine.core import EngineCore
from hybridserve.engine.executor import Executor
from hybridserve.engine.graph_plan import plan_graphs
from hybridserve.engine.messages import EngineRequest, SequenceOutput
from hybridserve.engine.planner import make_plan
from hybridserve.engine.worker import Worker
from tests.harness.models import oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from hybridserve.core.prefix_nodes import Checkpoint
    from hybridserve.core.slabs import UnitPool
    from hybridserve.core.step import ScheduledStep
    from hybridserve.engine.graphs import Recorder
    from hybridserve.engine.input_builder import BuiltStep, StepInput
    from hybridserve.engine.model_runner import ModelRunner, StepOutput
    from hybridserve.engine.sampler import Draws, Scores
    from hybridserve.layers.lora import AdaptableModule
    from hybridserve.lora.adapter import Adapter

POISONS = {
    "nan": bytes.fromhex("ffff"),  # NaN as bfloat16, float16 and float32
    "large": bytes.fromhex("7a44"),  # 1000 as bfloat16 and (nearly) float32: a select hides NaN, not this
}
TOLERANCE = 1e-4


@dataclass(slots=True)
class Result:
    """What one continuation produced."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    """After the last token that was fed: each state tensor of each layer, in the order of the cache specs."""
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    metrics: Any = None


class GuardedExecutor(Executor):
    """Runs a step when it is collected, so `delay` more steps may have been planned by then."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        delay: int,
        poison: str | None,
        checksum: bool,
        worker: Worker | None = None,
    ) -> None:
        self.max_in_flight = 1 + delay
        self.runner = runner
        self.worker = worker
        """For adapters; None where there are none."""
        self.arena = runner.arena
        self.host = runner.host
        self.layout = runner.arena.layout
        self.inputs: list[StepInput] = []
        self.logits: torch.Tensor | None = None
        self.on_execute: Callable[[StepInput], None] = lambda step: None
        self.on_executed: Callable[[StepInput], None] = lambda step: None
        self._queue: list[StepInput] = []
        self._poison = (
            None if poison is None else torch.frombuffer(bytearray(POISONS[poison]), dtype=torch.uint8)
        )
        self._checksum = checksum
        plain = self.runner._draw

        def draw(logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, Scores | None]:
            self.logits = logits.clone()  # the next replay overwrites them
            return plain(logits, draws)

        self.runner._draw = draw  # type: ignore[method-assign]
        self.left: dict[int, list[torch.Tensor]] = {}
        """By step: units of the arena that are free once its swaps out and moves have read them."""
        self._owned: list[torch.Tensor] = []
        """What was poisoned while the present step ran."""
        plain_move = self.arena.move

        def move(blocks: np.ndarray, slots: np.ndarray) -> None:
            plain_move(blocks, slots)
            self._poison_left(blocks, slots)

        self.arena.move = move  # type: ignore[method-assign]
        self.fill(self.arena.buffer)
        if self.host is not None:
            self.fill(self.host.buffer)

    @property
    def reads_arena(self) -> bool:
        """Whether a step that has not run swaps something out or moves it."""
        return any(
            len(copies)
            for step in self._queue
            for copies in (step.block_swaps_out, step.state_swaps_out, step.block_moves, step.state_moves)
        )

    def _poison_left(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        """What is free now, but for what was moved there."""
        kinds = ((blocks, self.arena.blocks), (slots, self.arena.slots))
        moved = [units[to] for copies, units in kinds for to in copies[:, 1].tolist()]
        left = [units[source] for copies, units in kinds for source in copies[:, 0].tolist()]
        self._owned = [*self.left.pop(self.inputs[-1].step_id, []), *left, *moved]
        kept = [unit.clone() for unit in moved]
        for unit in self._owned:
            self.fill(unit)
        for unit, content in zip(moved, kept, strict=True):
            unit.copy_(content)

    def fill(self, memory: torch.Tensor) -> None:
        if self._poison is not None:
            memory.copy_(self._poison.repeat(memory.numel() // 2).view_as(memory))

    def submit(self, step: StepInput) -> None:
        self._queue.append(step)

    def reset(self) -> None:
        self._queue.clear()
        self.left.clear()

    def close(self) -> None:
        self._queue.clear()

    def collect(self) -> StepOutput:
        step = self._queue.pop(0)
        self.inputs.append(step)
        if self.worker is not None:
            self.worker.check_adapters(step)
        self.fill(self.arena.buffer[: self.layout.slab_bytes])
        self.on_execute(step)
        buffers = [self.arena.buffer] + ([] if self.host is None else [self.host.buffer])
        before = [buffer.clone() for buffer in buffers] if self._checksum else []
        output = self.runner.execute(step)
        if before:
            self._check_untouched(step, before[0])
        if len(before) > 1:
            self._check_host_untouched(step, before[1])
        self.on_executed(step)
        return output

    @property
    def adaptable_modules(self) -> Mapping[str, AdaptableModule]:
        return self.worker.adaptable_modules if self.worker else {}

    def check_adapter(self, adapter: Adapter, pause: Callable[[], None]) -> None:
        assert self.worker is not None
        self.worker.check_adapter(adapter, pause)

    def stage_adapter(self, adapter: Adapter, pause: Callable[[], None]) -> Any:
        assert self.worker is not None
        return self.worker.stage_adapter(adapter, pause)

    def place_adapter(self, slot: int, generation: int, staged: Any) -> None:
        assert self.worker is not None
        assert not any(slot in step.adapter_slots for step in self._queue), "a step in flight uses the slot"
        self.worker.place_adapter(slot, generation, staged)

    def clear_adapter(self, slot: int) -> None:
        assert self.worker is not None
        assert not any(slot in step.adapter_slots for step in self._queue), "a step in flight uses the slot"
        self.worker.clear_adapter(slot)

    def _check_untouched(self, step: StepInput, before: torch.Tensor) -> None:
        """Bytes that the step does not own are what they were (F011, F026-F028, F048, F057, F073)."""
        owned = torch.zeros(len(before), dtype=torch.bool)
        owned[: self.layout.slab_bytes] = True
        if self.layout.blocks_per_slab:
            blocks = owned.as_strided(self.arena.blocks.shape, self.arena.blocks.stride())
            blocks[step.slot_mapping // self.layout.block_size] = True
            blocks[step.block_copies[:, 1]] = True
            blocks[step.block_swaps_in[:, 1]] = True
        if self.layout.slots_per_slab:
            slots = owned.as_strided(self.arena.slots.shape, self.arena.slots.stride())
            slots[step.state_slots] = True
            slots[step.state_copies[:, 1]] = True
            slots[step.state_saves[:, 1]] = True
            slots[step.state_swaps_in[:, 1]] = True
        for unit in self._owned:
            owned[unit.storage_offset() : unit.storage_offset() + len(unit)] = True
        changed = (before != self.arena.buffer) & ~owned
        assert not changed.any(), f"step {step.step_id} wrote to memory that it does not own"

    def _check_host_untouched(self, step: StepInput, before: torch.Tensor) -> None:
        """Nothing but what was swapped out has changed in the host's memory."""
        assert self.host is not None
        owned = torch.zeros(len(before), dtype=torch.bool)
        layout = self.layout
        kinds = (
            (step.block_swaps_out, layout.blocks_per_slab, layout.block_stride),
            (step.state_swaps_out, layout.slots_per_slab, layout.slot_stride),
        )
        for copies, first, stride in kinds:
            for unit in copies[:, 1].tolist():
                owned[(unit - first) * stride : (unit - first + 1) * stride] = True
        changed = (before != self.host.buffer) & ~owned
        assert not changed.any(), f"step {step.step_id} wrote to host memory that it does not own"


class Guarded:
    """An engine core over `path`. Every axis of the differential matrix is an argument.

    chunk: max_num_batched_tokens. row_order, slot_order: "forward", "reverse" or "shuffled".
    preempt_every: force a preemption of a random running sequence every so many steps. buckets: pad steps.
    delay: steps planned ahead. recorder: records decode steps, as an engine on a GPU would.
    """

    def __init__(
        self,
        path: Path,
        *,
        chunk: int = 64,
        buckets: Sequence[int] = (),
        delay: int = 0,
        poison: str | None = "nan",
        checksum: bool = True,
        memory: str = "1MiB",
        row_order: str = "forward",
        slot_order: str = "forward",
        preempt_every: int | None = None,
        recorder: Recorder | None = None,
        **options: Any,
    ) -> None:
        defaults = {
            "max_model_len": 256,
            "check_integrity": True,
            "prefix_caching": False,
            "host_swap_bytes": 0,
        }
        options = {**defaults, "memory_bytes": memory, **options}
        config = load_config(str(path), None, {"max_num_batched_tokens": chunk, **options})
        plan = make_plan(config, path)
        worker = Worker(path, plan)
        executor = GuardedExecutor(
            worker.runner, delay=delay, poison=poison, checksum=checksum, worker=worker
        )
        if recorder is not None:
            num_slots = 0 if plan.lora is None else plan.lora.num_slots
            graphs = plan_graphs(config, plan.layout, plan.max_model_len, None, num_slots)
            worker.record_graphs(graphs, recorder)
        core = EngineCore.create(config, plan, path, buckets=buckets, executor=executor)
        self._guard(core, executor, row_order, slot_order, preempt_every)

    @classmethod
    def over(
        cls,
        core: EngineCore,
        executor: GuardedExecutor,
        *,
        row_order: str = "forward",
        slot_order: str = "forward",
        preempt_every: int | None = None,
    ) -> Guarded:
        """Guards for an engine core that somebody else has built."""
        guarded = cls.__new__(cls)
        guarded._guard(core, executor, row_order, slot_order, preempt_every)
        return guarded

    def _guard(
        self,
        core: EngineCore,
        executor: GuardedExecutor,
        row_order: str,
        slot_order: str,
        preempt_every: int | None,
    ) -> None:
        self.core = core
        self.executor = executor
        self.layout = executor.layout
        self.row_order = row_order
        self.padding = ""
        self.results: dict[tuple[str, int], Result] = {}
        self.steps = 0
        self._rng = random.Random(0)
        self._preempt_every = preempt_every
        self._drawn_at_preemption: dict[str, int] = {}
        self._planned: dict[int, list[tuple[int, tuple[str, ...]]]] = {}
        self._cache = core.scheduler.cache
        self._initial = (self._cache.blocks.num_free, self._cache.slots.num_free, self._cache.slabs.num_free)
        self._reorder_units(slot_order)
        self._freed: list[torch.Tensor] = []
        self._poison_on_free(self._cache.blocks, executor.arena.blocks)
        self._poison_on_free(self._cache.slots, executor.arena.slots)
        if executor.host is not None:
            self._poison_host_on_free(self._cache.host.blocks, executor.host.blocks)
            self._poison_host_on_free(self._cache.host.slots, executor.host.slots)
        self._wrap_build()
        executor.on_executed = self._record

    def add(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams | None = None, **more: Any
    ) -> None:
        params = params or SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        request = EngineRequest(request_id=request_id, prompt_ids=list(prompt_ids), params=params, **more)
        self.core.add(request)
        for index in range(params.n):
            self.results[request_id, index] = Result(list(prompt_ids))

    def step(self) -> list[SequenceOutput]:
        self.steps += 1
        if self._preempt_every and self.steps % self._preempt_every == 0:
            self._force_preemption()
        outputs = self.core.step()
        self.core.scheduler.check_integrity()
        for output in outputs:
            result = self.results[output.request_id, output.index]
            result.token_ids += output.token_ids
            result.logprobs += output.logprobs or []
            result.prompt_logprobs += output.prompt_logprobs or []
            if output.finish_reason is not None:
                result.finish_reason = output.finish_reason
                result.metrics = output.metrics
        return outputs

    def _force_preemption(self) -> None:
        """Of a random running sequence that has drawn a token since it was last preempted, so that all
        end."""
        running = [r for r in self.core.scheduler.requests.values() if r.status is RequestStatus.RUNNING]
        ready = [r for r in running if len(r.output_ids) > self._drawn_at_preemption.get(r.id, -1)]
        if ready:
            chosen = self._rng.choice(ready)
            self._drawn_at_preemption[chosen.id] = len(chosen.output_ids)
            self.core.scheduler.preempt(chosen)

    def run(self, limit: int = 5000) -> dict[tuple[str, int], Result]:
        """Step until nothing is left, then check that all memory is back."""
        while self.core.has_work:
            self.step()
            assert self.steps < limit, "the engine does not come to an end"
        self.check_drained()
        return self.results

    def check_drained(self) -> None:
        cache = self.core.scheduler.cache  # another one after a restart
        cache.check_integrity([])
        cache.prefix.clear()
        cache.check_integrity([])
        assert (cache.blocks.num_free, cache.slots.num_free, cache.slabs.num_free) == self._initial
        if self.executor.host is not None:
            assert cache.host.slabs.num_free == cache.host.slabs.num_usable
        while self.core.adapters.num_loading:  # for requests that have been aborted
            self.core.adapters.wait()
            self.core._finish_loads()
        self.core.scheduler.adapters.check_integrity({})
        assert all(info.num_refs == 0 for info in self.core.adapters.infos())
        if self.executor.worker is not None:
            assert self.executor.worker.adapter_bytes == self.core.scheduler.adapters.num_bytes

    def slot_states(self, slot: int) -> list[torch.Tensor]:
        views = [view for view in self.executor.arena.views if isinstance(view, tuple)]
        return [tensor[slot].clone() for view in views for tensor in view]

    def checkpoint_states(self, checkpoint: Checkpoint) -> list[torch.Tensor]:
        """In either tier; where the copy to the host has been planned and not been made, in the arena yet."""
        if not checkpoint.is_hosted:
            return self.slot_states(checkpoint.slot)
        planned = self.core.scheduler.cache.host._swaps_out[SlabKind.STATE]
        if (source := planned.get(checkpoint.slot)) is not None:
            return self.slot_states(source)
        host = self.executor.host
        assert host is not None
        row = host.slots[checkpoint.slot - self.layout.slots_per_slab]
        states = []
        for index, spec in enumerate(self.layout.specs):
            if isinstance(spec, StateSpec):
                for tensor, start in zip(spec.tensors, self.layout.state_offsets(index), strict=True):
                    data = row[start : start + tensor.num_bytes].clone()
                    states.append(data.view(getattr(torch, tensor.dtype)).view(tensor.shape))
        return states

    def _record(self, step: StepInput) -> None:
        """Note each sequence's state and logits after a step; the last note of a sequence is its final
        state."""
        row = 0
        for place, samples in self._planned.pop(step.step_id):
            slot = int(step.state_slots[place])
            for request_id in samples:
                name, _, index = request_id.partition("#")
                result = self.results[name, int(index or 0)]
                if self.executor.logits is not None:
                    result.logits.append(self.executor.logits[row])
                result.states = self.slot_states(slot) if slot else []
                row += 1

    def _wrap_build(self) -> None:
        """Reorder a step's rows, and put padding rows between them, before arrays are made of them."""
        plain = self.core._builder.build

        def build(step: ScheduledStep, requests: Mapping[str, Request]) -> BuiltStep:
            sequences = self._ordered(list(step.sequences))
            if self.padding:
                places = {"before": [0], "between": range(1, len(sequences)), "behind": [len(sequences)]}
                for place in sorted(places[self.padding], reverse=True):
                    names = (f"pad{place}a", f"pad{place}b")
                    requests = {**requests, **{name: Request(name, [0], SamplingParams()) for name in names}}
                    sequences[place:place] = [
                        ScheduledSequence(name, 0, 1, (), False, (0,), 0) for name in names
                    ]
            self.executor.left[step.step_id], self._freed = self._freed, []
            self._planned[step.step_id] = [
                (place, seq.samples) for place, seq in enumerate(sequences) if seq.samples
            ]
            return plain(dataclasses.replace(step, sequences=tuple(sequences)), requests)

        self.core._builder.build = build  # type: ignore[method-assign]

    def _ordered(self, sequences: list[ScheduledSequence]) -> list[ScheduledSequence]:
        if self.row_order == "reverse":
            return sequences[::-1]
        if self.row_order == "shuffled":
            self._rng.shuffle(sequences)
        elif self.row_order != "forward":  # decodes and prefills as spelled, such as "dpdp"
            kinds = {
                "d": [s for s in sequences if s.length == 1],
                "p": [s for s in sequences if s.length > 1],
            }
            return [kinds[kind].pop(0) for kind in self.row_order]
        return sequences

    def _reorder_units(self, order: str) -> None:
        if order == "forward":
            return
        slabs = self._cache.slabs
        free = list(range(1, slabs.num_slabs))
        if order == "shuffled":
            self._rng.shuffle(free)
        slabs._returned, slabs._fresh = free, slabs.num_slabs
        slabs._kinds = bytearray([SlabKind.NULL] + [SlabKind.FREE] * len(free))
        for pool in (self._cache.blocks, self._cache.slots):
            self._reorder_slabs_of(pool, order)

    def _reorder_slabs_of(self, pool: UnitPool, order: str) -> None:
        plain = pool._open_slab

        def open_slab() -> tuple[int, int]:
            slab, size = plain()
            pool._free[slab].reverse()
            if order == "shuffled":
                self._rng.shuffle(pool._free[slab])
            return slab, size

        pool._open_slab = open_slab  # type: ignore[method-assign]

    def _poison_on_free(self, pool: UnitPool, memory: torch.Tensor) -> None:
        plain = pool._give

        def give(unit: int) -> None:
            if self._reads_arena():
                self._freed.append(memory[unit])
            else:
                self.executor.fill(memory[unit])
            plain(unit)

        pool._give = give  # type: ignore[method-assign]

    def _reads_arena(self) -> bool:
        """Whether a copy that is planned has not read what it copies yet."""
        cache = self._cache
        if self._freed or cache.blocks._moves or cache.slots._moves or self.executor.reads_arena:
            return True
        return self.executor.host is not None and any(cache.host._swaps_out.values())

    def _poison_host_on_free(self, pool: UnitPool, memory: torch.Tensor) -> None:
        """No step that has not run reads a unit of the host that is free."""
        plain = pool._give

        def give(unit: int) -> None:
            self.executor.fill(memory[unit - pool.units_per_slab])
            plain(unit)

        pool._give = give  # type: ignore[method-assign]


class Oracle:
    """transformers in float32: one uncached forward over a request's tokens, alone."""

    def __init__(self, model: Path | torch.nn.Module) -> None:
        if not isinstance(model, torch.nn.Module):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.model = model
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def forward(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits [T, V] after each token, and the final states of the recurrent layers: conv, then SSM, of
        each."""
        key = tuple(token_ids)
        if key not in self._known:
            logits, states = oracle(self.model, token_ids)
            self._known[key] = logits, [tensor for pair in states for tensor in pair]
        return self._known[key]

    def greedy(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        token_ids = list(prompt_ids)
        for _ in range(count):
            token_ids.append(int(self.forward(token_ids)[0][-1].argmax()))
        return token_ids[len(prompt_ids) :]

    def check(self, result: Result) -> None:
        """Greedy tokens, the logits that they were drawn from, and the final states are the oracle's."""
        fed = [*result.prompt_ids, *result.token_ids[:-1]]
        logits, states = self.forward(fed)
        tolerance = self.tolerance(fed)
        expected = logits[len(result.prompt_ids) - 1 :]
        # what has been drawn is never drawn again, so there is one row of logits a token
        assert len(result.logits) == len(result.token_ids)
        assert (torch.stack(result.logits) - expected).abs().max() <= tolerance
        if tolerance == TOLERANCE:
            assert result.token_ids == expected.argmax(-1).tolist()
        else:
            drawn = expected.gather(1, torch.tensor(result.token_ids).unsqueeze(1)).squeeze(1)
            assert (expected.amax(-1) - drawn <= 2 * tolerance).all()
        assert len(states) == len(result.states)
        for mine, theirs in zip(result.states, states, strict=True):
            assert (mine - theirs).abs().max() <= tolerance

    def tolerance(self, token_ids: Sequence[int]) -> float:
        """Of the answer to these."""
        return TOLERANCE

    def check_all(self, results: Mapping[tuple[str, int], Result]) -> None:
        for key, result in results.items():
            assert result.finish_reason == "length", key
            self.check(result)


def make_prompts(lengths: Iterable[int], seed: int = 0, vocab_size: int = 512) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, length).tolist() for length in lengths]
