"""Known faults of serving engines, as far as a scheduler can commit them; and how full the arena gets."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec, StateSpec, StateTensor
from hybridserve.core.request import FinishReason, Request, SamplingParams
from hybridserve.core.scheduler import Scheduler
from tests.harness.scripted import EOS, ScriptedEngine, alone, toy_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridserve.core.cache_manager import CacheUsage


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("slots_per_slab", [1, 2])
def test_f034_a_burst_of_twice_as_many_requests_as_slots(depth: int, slots_per_slab: int) -> None:
    e = ScriptedEngine(
        toy_layout(9, slots_per_slab=slots_per_slab), depth, max_num_seqs=64, max_num_batched_tokens=256
    )
    num_slots = e.layout.num_usable_slabs * slots_per_slab
    for index in range(2 * num_slots):
        e.add(f"r{index}", [index % 31, 1], max_tokens=3, ignore_eos=True)
    e.step()
    assert 0 < e.scheduler.num_running < num_slots
    e.run()
    e.check_outputs()
    e.check_drained()


def test_f034_state_only() -> None:
    e = ScriptedEngine(toy_layout(9, kind="state"), max_num_seqs=64, max_num_batched_tokens=256)
    for index in range(16):
        e.add(f"r{index}", [index, 1], max_tokens=3, ignore_eos=True)
    e.step()
    assert e.scheduler.num_running == 8
    e.run()
    e.check_outputs()
    e.check_drained()


def _waiting(e: ScriptedEngine) -> None:
    e.requests["x"] = e.scheduler.requests["x"]


def _mid_chunk(e: ScriptedEngine) -> None:
    e.plan()
    assert 0 < e.requests["x"].num_computed < e.requests["x"].num_prompt


def _mid_chunk_finished(e: ScriptedEngine) -> None:
    _mid_chunk(e)
    e.finish_step()


def _decoding(e: ScriptedEngine) -> None:
    while len(e.requests["x"].output_ids) < 2:
        e.step()


def _decoding_in_flight(e: ScriptedEngine) -> None:
    _decoding(e)
    e.plan()
    assert e.requests["x"].num_pending


def _preempted(e: ScriptedEngine) -> None:
    _decoding(e)
    e.scheduler.preempt(e.requests["x"])


def _preempted_in_flight(e: ScriptedEngine) -> None:
    _decoding_in_flight(e)
    e.scheduler.preempt(e.requests["x"])


def _recomputing(e: ScriptedEngine) -> None:
    _preempted(e)
    e.step()


def _finished(e: ScriptedEngine) -> None:
    while "x" in e.scheduler.requests:
        e.step()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "reach",
    [
        _waiting,
        _mid_chunk,
        _mid_chunk_finished,
        _decoding,
        _decoding_in_flight,
        _preempted,
        _preempted_in_flight,
        _recomputing,
        _finished,
    ],
)
def test_f036_abort_in_any_state(reach: Callable[[ScriptedEngine], None], depth: int) -> None:
    e = ScriptedEngine(toy_layout(20), depth, max_num_batched_tokens=6)
    for round_ in range(3 * 20):  # far more than the pool holds, if a slot were lost each time
        e.requests.clear()
        e.events.clear()
        e.add("x", [3, 1, 4, 1, 5, 9, 2, 6], max_tokens=6, ignore_eos=True)
        e.add("y", [2, 7, 1, round_ % 31], max_tokens=3, ignore_eos=True)
        reach(e)
        ended = e.abort("x")
        assert len(ended) == (reach is not _finished)
        assert e.abort("x") == []  # twice
        assert e.abort("nobody") == []
        e.run()
        e.check_outputs()
        e.check_drained()


@pytest.mark.parametrize("block_size", [4, 8])
def test_f041_every_step_with_work_advances(block_size: int) -> None:
    layout = toy_layout(30, block_size=block_size)
    for budget in range(1, 10):
        for num_prompt in range(1, 21):
            e = ScriptedEngine(layout, 1 + num_prompt % 2, max_num_batched_tokens=budget)
            e.add("a", [1] * num_prompt, max_tokens=3, ignore_eos=True)
            e.add("b", [2] * 7, max_tokens=2, ignore_eos=True)
            e.run(max_steps=num_prompt + 7 + 2 * 6)
            assert sum(step.num_tokens for step in e.steps) == num_prompt + 2 + 7 + 1
            assert len(e.steps) <= -(-num_prompt // budget) + -(-7 // budget) + 6
            e.check_outputs()


def _prompt_that_stops(after: int) -> list[int]:
    for a in range(31):
        for b in range(31):
            if (
                len(outputs := alone([a, b, 1], SamplingParams(max_tokens=40), 0, 64)) == after
                and outputs[-1] == EOS
            ):
                return [a, b, 1]
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("event", ["stop", "abort", "preempt"])
def test_f057_what_a_step_in_flight_writes_has_no_new_tenant(event: str) -> None:
    """One slot's worth of memory: a new tenant can only start in what the old one held."""
    e = ScriptedEngine(toy_layout(3), depth=2, max_model_len=16)
    e.add("old", _prompt_that_stops(3), max_tokens=10, ignore_eos=event != "stop")
    e.add("new", [4, 5, 6], max_tokens=4, ignore_eos=True)
    old = e.requests["old"]
    while len(old.output_ids) < 2:
        e.step()
    in_flight = e.plan()
    assert in_flight is not None
    assert [s.request_id for s in in_flight.sequences] == ["old"]
    e.finish_step()
    if (
        event == "stop"
    ):  # the token that came ends the sequence: the step that is in flight was planned in vain
        assert old.finish_reason is FinishReason.STOP
    elif event == "abort":
        e.abort("old")
    else:
        e.scheduler.preempt(old)
    assert e.scheduler.cache.usage().num_slots == 1
    assert e.plan() is None, "the slot is not free before the step in flight has finished"
    told = [done.request_id for done in e.finish_step()]
    assert told == (["old"] if event == "preempt" else [])
    assert e.scheduler.cache.usage().num_slots == 0
    e.run()
    assert e.requests["new"].finish_reason is FinishReason.LENGTH
    e.check_outputs()
    e.check_drained()


# ---- how full the arena gets


def jamba_mini(arena_bytes: int) -> CacheLayout:
    kv = PagedKVSpec(num_kv_heads=8, head_dim=128, dtype="bfloat16")
    state = StateSpec((StateTensor("conv", (8192, 3), "bfloat16"), StateTensor("ssm", (8192, 16), "float32")))
    return CacheLayout.build([kv if i % 8 == 4 else state for i in range(32)], 16, arena_bytes)


class Mix:
    """200 short sequences and then 2 long ones, in one arena with no setting changed."""

    def __init__(self, layout: CacheLayout, num_long_tokens: int) -> None:
        self.scheduler = Scheduler(
            layout, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=num_long_tokens
        )
        self.at_first_preemption: CacheUsage | None = None
        self._preempt, self.scheduler.preempt = self.scheduler.preempt, self._watch  # type: ignore[method-assign]

    def _watch(self, request: Request) -> None:
        self.at_first_preemption = self.at_first_preemption or self.scheduler.cache.usage()
        self._preempt(request)

    def add(self, name: str, num_prompt: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(Request(name, [1] * num_prompt, params))

    def step(self) -> None:
        step = self.scheduler.schedule()
        assert step is not None
        sampled = {name: 1 for sequence in step.sequences for name in sequence.samples}
        self.scheduler.update(step.step_id, sampled)

    def run_until_preemption(self) -> CacheUsage:
        while self.scheduler.has_work and self.at_first_preemption is None:
            self.step()
        assert self.at_first_preemption is not None
        return self.at_first_preemption


def test_short_sequences_and_then_long_ones_fill_the_same_arena() -> None:
    layout = jamba_mini(8 << 30)
    longest = layout.max_tokens_one_sequence()
    assert longest is not None
    mix = Mix(layout, longest)
    for index in range(200):
        mix.add(f"short{index}", 100, 20)
    most_slots = 0
    while mix.scheduler.has_work:
        mix.step()
        most_slots = max(most_slots, mix.scheduler.cache.usage().num_slots)
    assert most_slots == 200  # 200 states were there at once ...
    assert mix.scheduler.counters.num_preemptions == 0
    for index in range(2):
        mix.add(f"long{index}", longest // 2 - 1000, 1000)
    usage = mix.run_until_preemption()
    assert usage.num_slots == 2  # ... and now nearly all of it is KV
    assert usage.utilisation >= 0.98


@pytest.mark.parametrize("order", ["random", "as they came"])
def test_long_sequences_beside_short_ones_that_are_still_there(order: str) -> None:
    """Half of the short ones have left, in any order: the holes that they left are of use."""
    layout = jamba_mini(8 << 30)
    longest = layout.max_tokens_one_sequence()
    assert longest is not None
    mix = Mix(layout, longest)
    for index in range(200):
        mix.add(f"short{index}", 100, 4000)
    for _ in range(30):
        mix.step()
    names = [f"short{index}" for index in range(200)]
    if order == "random":
        random.Random(0).shuffle(names)
    for name in names[:100]:
        mix.scheduler.abort(name)
    for index in range(2):
        mix.add(f"long{index}", longest // 3, 4000)
    usage = mix.run_until_preemption()
    assert usage.num_slots == 102
    assert usage.utilisation >= 0.98
