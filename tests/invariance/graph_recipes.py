"""Recipes of faults.md and lora.md that are about recorded decode steps, over the stand-in for CUDA graphs.
The numbers are those of the faults; `tests/graph_mutations.py` has theirs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from hybridserve.core.request import SamplingParams
from hybridserve.lora.batch import rows_with_adapters
from tests.graph_mutations import MAX_LOADED
from tests.harness.adapter_engine import AdapterEngine
from tests.harness.adapters import ATTENTION, DENSE, ENDS, EXPERTS, MAMBA, AdapterSpec
from tests.harness.engine import Guarded, make_prompts
from tests.harness.recorder import GraphGuarded, StandInRecorder

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.engine.graphs import DecodeGraphs
    from hybridserve.engine.input_builder import StepInput
    from hybridserve.engine.step_tensors import StepTensors
    from hybridserve.kernels.lora.interface import LoraBatch, LoraTable
    from tests.harness.adapter_engine import Oracles
    from tests.harness.adapters import Kit
    from tests.harness.engine import Oracle


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def f026_padding_and_slot_0(model: Path, oracle: Oracle) -> None:
    """Three live rows in a recording of four: the fourth lives in the null slot and the null block, and the
    harness sees that no other byte changes, of slots 0 and 1 in particular."""
    engine = GraphGuarded(model, poison="large")
    for index, prompt in enumerate(make_prompts([4, 2, 3])):
        engine.add(f"r{index}", prompt, greedy(10))
    tensors = engine.graphs._graphs[False, 4, engine.core.scheduler.max_model_len].tensors

    def look(step: StepInput) -> None:
        if len(step.state_slots) == 3 == len(step.input_ids):
            assert tensors.state_slots.tolist() == [*step.state_slots.tolist(), 0]
            assert tensors.slot_mapping[3] == tensors.block_table[3, 0] == 0
            assert tensors.has_state.tolist() == [True] * 3 + [False]

    record = engine.executor.on_executed
    engine.executor.on_executed = lambda step: (record(step), look(step))[0]
    oracle.check_all(engine.run())
    assert engine.recorder.num_replays >= 9


def f027_padding_and_the_lowest_slot(model: Path, oracle: Oracle) -> None:
    """Live requests in the lowest slots and blocks that can be handed out, beside padding rows."""
    engine = GraphGuarded(model, poison="large")
    for index, prompt in enumerate(make_prompts([5, 3, 8])):
        engine.add(f"r{index}", prompt, greedy(12))
    engine.step()
    slots = [request.state_slot for request in engine.core.scheduler.requests.values()]
    assert min(slots) % engine.layout.slots_per_slab == 0  # of the only slab that holds slots
    oracle.check_all(engine.run())


def f028_padding_and_who_waits(model: Path, oracle: Oracle) -> None:
    """Six live sequences, of which a step has two or three: the others' slots and blocks stay what they are,
    whatever the padding rows do."""
    engine = GraphGuarded(model, poison="large", chunk=3)
    for index, prompt in enumerate(make_prompts([4, 5, 2, 3, 6, 7])):
        engine.add(f"r{index}", prompt, greedy(12))
    oracle.check_all(engine.run())
    seen = {len(step.state_slots) for step in engine.executor.inputs if len(step.input_ids) == 3}
    assert 3 in seen, "three rows in a recording of four, beside others that wait"


def f029_scratch_memory_is_nan(model: Path, oracle: Oracle) -> None:
    """What a replay leaves between two steps is NaN, and so is all fresh memory: nothing of it reaches a live
    row or slot, nor stays in the null slot."""
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        engine = GraphGuarded(model, poison=None)
        engine.executor.arena.buffer.zero_()
        for index, prompt in enumerate(make_prompts([4, 7, 2])):
            engine.add(f"r{index}", prompt, greedy(50))
        results = engine.run()
        assert all(state.isfinite().all() for state in engine.slot_states(0))
    finally:
        torch.use_deterministic_algorithms(False)
    oracle.check_all(results)


def f033_more_sequences_allowed_than_slots(model: Path, oracle: Oracle) -> None:
    """A few slots, 64 sequences allowed: recordings are for as many as memory holds, which the plan says, and
    ten requests are served."""
    engine = GraphGuarded(model, memory="220KiB", max_num_seqs=64, max_model_len=24)
    plan = engine.graphs.plan
    room = engine.layout.max_sequences(1)
    assert room < 64
    assert plan.sizes[-1] == room
    assert f"max_num_seqs is 64, but memory holds {room}" in plan.row()[1]
    for index, prompt in enumerate(make_prompts(range(1, 11))):
        engine.add(f"r{index}", prompt, greedy(5))
    oracle.check_all(engine.run())
    assert engine.recorder.num_replays


def rows_come_and_go(model: Path, oracle: Oracle) -> None:
    """The number of rows goes up and down, so recordings of all sizes take turns over the same buffers, one
    step ahead of what was drawn; sequences are preempted, aborted and fork."""
    engine = GraphGuarded(model, delay=1, preempt_every=7, preemption="swap", host_swap_bytes="1MiB")
    for index, prompt in enumerate(make_prompts([3, 9, 1, 4, 6, 2, 17, 5])):
        engine.add(f"r{index}", prompt, greedy(3 + 5 * (index % 4)))
        if index % 2:
            engine.step()
    forked = SamplingParams(n=3, temperature=0, max_tokens=9, ignore_eos=True)
    engine.add("fork", make_prompts([6], seed=5)[0], forked)
    engine.add("gone", make_prompts([6], seed=6)[0], greedy(50))
    for _ in range(6):
        engine.step()
    engine.core.abort("gone")
    results = engine.run()
    del results["gone", 0]
    oracle.check_all(results)
    assert engine.recorder.num_replays > 10


RANKS = {
    "r8": AdapterSpec(11, 8, (*MAMBA, *ENDS), EXPERTS),
    "r16": AdapterSpec(12, 16, (*ATTENTION, *DENSE)),
    "r64": AdapterSpec(13, 64, ("q_proj", "in_proj", "down_proj", "lm_head")),
}


def l014_adapters_come_and_go(kit: Kit, oracles: Oracles) -> None:
    """Row counts go up and down, adapters of other ranks and other modules take each other's slots, and
    steps of the base model come in between. Every decode step is replayed, by a recording with adapters where
    some row has one and by another where none has; what is in the adapters' buffers before a step is
    nobody's business; and buffers stay where they are."""
    recorder = StandInRecorder()
    kernels = {f"kernels.{op}": "reference" for op in ("attention", "ssm", "lora")}
    for name, spec in RANKS.items():
        kit.adapter(name, spec)
    engine = AdapterEngine(
        kit, [*RANKS, "A"], lora={"max_loaded": MAX_LOADED}, recorder=recorder, max_num_seqs=8, **kernels
    )
    graphs = engine.executor.runner.graphs
    assert graphs is not None
    recorder.poisoned = graphs.logits
    assert recorder.num_recorded == graphs.plan.num_recordings == 2 * len((1, 2, 4, 8))
    places = [tensor.data_ptr() for tensor in buffers(graphs)]
    seen = []

    def look(step: StepInput) -> None:
        rows = rows_with_adapters(step.adapter_slots, step.adapter_start, step.query_start, step.positions)
        graph = graphs.find(step, rows)
        seen.append((len(step.seq_lens), graph is not None and graph.adapters is not None))
        if graph is None or graph.adapters is None:
            return
        batch, padding = graph.adapters.batch, [0] * (graph.size - len(step.seq_lens))
        assert rows is not None
        assert batch.row_slots.tolist() == [*rows.tolist(), *padding]
        covered = [
            (slot, row)
            for slot, start, count in batch.chunks.tolist()
            for row in batch.rows[start : start + count].tolist()
        ]
        assert sorted(covered) == sorted((slot, row) for row, slot in enumerate(rows.tolist()) if slot)

    @torch.inference_mode()
    def spoil(step: StepInput) -> None:
        graphs._adapters.fill_(1)
        for table in registry.tables:
            assert written[table] == table.version, "a recording would read a table as it was"

    def write(table: LoraTable, device: torch.device) -> None:
        written[table] = table.version

    registry, written = engine.executor.worker._context.lora, {}
    registry.backend.write = write
    registry.write(torch.device("cpu"))
    record = engine.executor.on_executed
    engine.executor.on_execute = spoil
    engine.executor.on_executed = lambda step: (record(step), look(step))[0]
    asked = [(None, 4), ("r8", 9), (None, 20), ("r64", 5), ("r8", 3), ("A", 7), (None, 6), ("r16", 8)]
    for index, (name, num_tokens) in enumerate(asked):
        prompt = make_prompts([3 + index], seed=index, vocab_size=128)[0]
        engine.ask(f"r{index}", prompt, name, num_tokens)
        for _ in range(2 * (index % 2)):
            engine.step()
    engine.run()
    for index, num_tokens in enumerate((5, 5, 5, 3)):  # three are left of four, in a recording of four
        engine.ask(f"four-{index}", make_prompts([4], seed=index, vocab_size=128)[0], "r8", num_tokens)
    engine.run()
    for index, name in enumerate(("r16", None, "r64", None)):
        engine.ask(f"alone-{index}", make_prompts([4], seed=index, vocab_size=128)[0], name, 3)
        engine.run()
    engine.check_all(oracles)
    decodes = [step for step in engine.executor.inputs if len(step.input_ids) == len(step.seq_lens)]
    assert recorder.num_replays == len(decodes)
    assert {kind for _, kind in seen} == {True, False}
    assert len({size for size, kind in seen if kind}) > 2
    assert places == [tensor.data_ptr() for tensor in buffers(graphs)]


def buffers(graphs: DecodeGraphs) -> list[torch.Tensor]:
    """All that recordings read of a step, and what they leave."""
    return [
        tensor
        for graph in graphs._graphs.values()
        for tensor in (
            *fields_of(graph.tensors),
            *([] if graph.adapters is None else fields_of(graph.adapters.batch)),
            graph.columns,
            graph.logits,
        )
        if isinstance(tensor, torch.Tensor)
    ]


def fields_of(each: StepTensors | LoraBatch) -> list[object]:
    return [getattr(each, field.name) for field in dataclasses.fields(each)]


def eager_and_recorded_are_the_same(model: Path, oracle: Oracle) -> None:
    """Drawn, scored, biased and penalised tokens are those of an engine that records nothing; and a step that
    scores a prompt is not replayed."""
    common = {"max_tokens": 8, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.9, top_k=30, top_p=0.9, seed=4, logprobs=2, **common),
        SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, **common),
        SamplingParams(temperature=0, logit_bias={7: 4.0}, prompt_logprobs=1, **common),
        SamplingParams(temperature=1.2, min_p=0.02, seed=9, allowed_token_ids=list(range(40)), **common),
    ]
    seen = []
    for kind in (GraphGuarded, Guarded):
        kernels = {f"kernels.{op}": "reference" for op in ("attention", "ssm")}
        engine = kind(model, max_num_seqs=8, **kernels)
        for index, (prompt, each) in enumerate(zip(make_prompts([4, 1, 7, 1]), params, strict=True)):
            engine.add(f"r{index}", prompt, each)
        results = engine.run()
        seen.append(results)
    for key, result in seen[0].items():
        assert result.token_ids == seen[1][key].token_ids, key
        assert len(result.prompt_logprobs) == len(seen[1][key].prompt_logprobs)
        for mine, theirs in zip(result.logprobs, seen[1][key].logprobs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert max(abs(a - b) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)) < 1e-4
