"""Sequences that leave the arena, come back elsewhere and are moved about, while others use their units: on
every rank alike, so that nothing of what is drawn differs by a bit. The steps are written by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.config.loader import load_config
from hybridserve.core.request import Request, SamplingParams
from hybridserve.core.step import ScheduledSequence, ScheduledStep, UnitCopies, UnitCopy
from hybridserve.engine.executors import create_executor
from hybridserve.engine.input_builder import InputBuilder
from hybridserve.engine.planner import make_plan
from tests.harness.engine import make_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.engine.executor import Executor

BLOCK_SIZE = 4
LENGTHS = {"a": 14, "b": 10}
NUM_BLOCKS = 6
"""Of each sequence, for its whole life."""
TOPOLOGIES = {"one": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=8)

Place = tuple[tuple[int, ...], int]
"""A sequence's blocks and its slot."""


@dataclass
class Script:
    """Runs steps of sequences "a" and "b", and keeps what they drew."""

    executor: Executor
    builder: InputBuilder = field(default_factory=lambda: InputBuilder(block_size=BLOCK_SIZE, seed=0))
    requests: dict[str, Request] = field(default_factory=dict)
    drawn: list[Any] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        prompts = make_prompts(LENGTHS.values(), vocab_size=128)
        for name, prompt in zip(LENGTHS, prompts, strict=True):
            self.requests[name] = Request(name, prompt, PARAMS)

    def step(
        self, first_step_id: int, shares: Mapping[str, int], places: Mapping[str, Place], **more: Any
    ) -> None:
        """`shares`: so many tokens of each."""
        sequences = []
        for name, length in shares.items():
            request, (blocks, slot) = self.requests[name], places[name]
            start = request.num_computed
            draws = (name,) if start + length == request.num_known else ()
            sequences.append(ScheduledSequence(name, start, length, draws, start > 0, blocks, slot))
            request.num_computed += length
        step = ScheduledStep(first_step_id + self.num_steps, tuple(sequences), **more)
        self.num_steps += 1
        built = self.builder.build(step, self.requests)
        self.executor.submit(built.input)
        output = self.executor.collect()
        for name, token in zip(built.sample_ids, output.token_ids, strict=True):
            self.requests[name].output_ids.append(token)
        scores = output.logprobs
        self.drawn.append((output.token_ids, scores and (scores.chosen, scores.top_ids, scores.top_values)))


STEPS: list[dict[str, int]] = [
    {"a": 9},
    {"a": 5},
    {"a": 1},
    {"b": 10},  # where a was
    {"b": 1},
    {"b": 1, "a": 1},  # a is back
    {"b": 1, "a": 1},  # both are moved
    {"b": 1, "a": 1},  # they change places
    {"b": 1, "a": 1},  # b is moved once more
    {"b": 1, "a": 1},
]


def undisturbed(script: Script, first_step_id: int, layout: CacheLayout) -> None:
    slabs = Slabs(layout)
    places = {"a": (slabs.blocks(0), slabs.slot(0)), "b": (slabs.blocks(1), slabs.slot(1))}
    for shares in STEPS:
        script.step(first_step_id, shares, places)


def disturbed(script: Script, first_step_id: int, layout: CacheLayout) -> None:
    slabs = Slabs(layout)
    a: Place = slabs.blocks(0), slabs.slot(0)
    b: Place = slabs.blocks(0), slabs.slot(0)  # later
    out_a: Place = (*slabs.blocks(1)[2:], *slabs.blocks(1)[:2]), slabs.slot(2)  # of the host: two runs
    elsewhere: Place = slabs.blocks(2)[::-1], slabs.slot(3)
    steps = iter(STEPS)

    def step(**more: Any) -> None:
        script.step(first_step_id, next(steps), {"a": a, "b": b}, **more)

    for _ in range(3):
        step()
    step(swaps_out=copies(a, out_a), finished=("a",))
    step()
    a, before = elsewhere, a
    step(swaps_in=copies(out_a, a))
    # the slab of a block of a becomes that of the slot of b, and the reverse
    a, from_a = (slabs.blocks_in_slab_of(before[1]), slabs.slot(4)), a
    b, from_b = (slabs.blocks(1), slabs.slot_in_slab_of(elsewhere[0][0])), b
    step(moves=both(copies(from_a, a), copies(from_b, b)), moved=("a", "b"))
    # in one step b goes out, a comes into its units, and b back into a's
    out_b: Place = slabs.blocks(3), slabs.slot(5)
    a, b = b, a
    step(swaps_out=copies(a, out_b), moves=copies(b, a), swaps_in=copies(out_b, b), moved=("a", "b"))
    b, from_b = (slabs.blocks(3), slabs.slot(5)), b
    step(moves=copies(from_b, b), moved=("b",))
    step()


class Slabs:
    """Units by number, each group of blocks and each slot in slabs of their own; slab 0 is left out."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._each = -(-NUM_BLOCKS // layout.blocks_per_slab)
        assert 1 + 4 * self._each + 6 <= layout.num_slabs

    def blocks(self, number: int) -> tuple[int, ...]:
        return self._blocks_from(1 + number * self._each)

    def slot(self, number: int) -> int:
        return (1 + 4 * self._each + number) * self._layout.slots_per_slab

    def blocks_in_slab_of(self, slot: int) -> tuple[int, ...]:
        return self._blocks_from(slot // self._layout.slots_per_slab)

    def slot_in_slab_of(self, block: int) -> int:
        return block // self._layout.blocks_per_slab * self._layout.slots_per_slab

    def _blocks_from(self, slab: int) -> tuple[int, ...]:
        first = slab * self._layout.blocks_per_slab
        return tuple(range(first, first + NUM_BLOCKS))


def copies(source: Place, destination: Place) -> UnitCopies:
    blocks = tuple(map(UnitCopy, source[0], destination[0]))
    return UnitCopies(blocks, (UnitCopy(source[1], destination[1]),))


def both(one: UnitCopies, other: UnitCopies) -> UnitCopies:
    return UnitCopies(one.blocks + other.blocks, one.slots + other.slots)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_who_is_swapped_and_moved_draws_the_same(model: Callable[[str], Path], name: str) -> None:
    tensor, pipeline = TOPOLOGIES[name]
    path = model("jamba")
    options = {
        "max_model_len": 64,
        "memory_bytes": "2MiB",
        "host_swap_bytes": "2MiB",
        "block_size": BLOCK_SIZE,
        "parallel.tensor": tensor,
        "parallel.pipeline": pipeline,
    }
    config = load_config(str(path), None, options)
    plan = make_plan(config, path)
    executor = create_executor(config.parallel, plan, path)
    try:
        results = []
        for number, play in enumerate((undisturbed, disturbed)):
            script = Script(executor)
            play(script, number * len(STEPS), plan.layout)
            results.append(script.drawn)
    finally:
        executor.close()
    assert len(results[0]) == len(STEPS)
    assert [len(ids) for ids, _ in results[0]] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    assert results[0] == results[1]
