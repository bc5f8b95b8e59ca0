"""Many adapters, few slots: the scheduler's rules, and the known faults of serving adapters that a scheduler
can commit."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter

import pytest

from hybridserve.core.adapter_slots import AdapterSlots
from hybridserve.core.adapter_turns import QUANTUM_STEPS
from hybridserve.core.fair_queue import BASE
from hybridserve.core.request import FinishReason, Request, RequestStatus, SamplingParams
from hybridserve.core.scheduler import Scheduler
from tests.harness.scripted import ScriptedEngine, toy_layout


def engine(num_slots: int = 2, depth: int = 1, *, num_slabs: int = 60, **options: object) -> ScriptedEngine:
    return ScriptedEngine(toy_layout(num_slabs), depth, num_slots=num_slots, **options)


def add(e: ScriptedEngine, name: str, num_prompt: int = 3, **changes: object) -> Request:
    """A request by its name: the letter before any digit is its adapter, "-" the base model."""
    adapter = None if name[0] == "-" else name[0]
    seed = sum(map(ord, name))
    params = {"max_tokens": 4, "ignore_eos": True, **changes}
    return e.add(name, [(seed + i) % 31 for i in range(num_prompt)], adapter=adapter, **params)


def names(step: object) -> set[str]:
    return set() if step is None else {sequence.request_id for sequence in step.sequences}


def first_steps(e: ScriptedEngine) -> dict[str, int]:
    """The first step that each request was in."""
    first: dict[str, int] = {}
    for index, step in enumerate(e.steps):
        for name in names(step):
            first.setdefault(name, index)
    return first


def finish(e: ScriptedEngine, **limits: int) -> None:
    e.run(**limits)
    e.check_outputs()
    e.check_drained()


# ---- loads


def test_the_first_request_for_an_adapter_asks_for_its_load() -> None:
    e = engine(auto_load=False)
    add(e, "a")
    assert e.step() is None
    assert e.scheduler.waiting_for_adapters
    assert [(load.adapter_id, load.slot) for load in e.loading] == [("a-1", 1)]
    add(e, "a2")
    assert e.step() is None
    assert len(e.loading) == 1  # loaded once, however many wait
    e.finish_load()
    assert not e.scheduler.waiting_for_adapters
    step = e.step()
    assert names(step) == {"a", "a2"}
    assert [(s.adapter_slot, s.adapter_start) for s in step.sequences] == [(1, 0), (1, 0)]
    assert step.adapter_generations == ((1, 1),)
    finish(e)


def test_several_load_at_once_in_the_order_of_their_turns() -> None:
    e = engine(num_slots=3, auto_load=False)
    for name in "abcd":
        add(e, name)
    e.step()
    assert [load.adapter_id for load in e.loading] == ["a-1", "b-1", "c-1"]
    e.finish_load(2)  # they need not end in order
    assert names(e.step()) == {"c"}
    e.auto_load = True
    finish(e)
    assert e.loaded == ["c-1", "a-1", "b-1", "d-1"]


def test_nobody_waits_for_a_load_but_those_that_need_it() -> None:
    e = engine(auto_load=False)
    add(e, "a")
    add(e, "-")
    add(e, "b")
    assert names(e.step()) == {"-"}
    assert not e.scheduler.waiting_for_adapters
    e.finish_load(1)
    assert names(e.step()) == {"-", "b"}
    e.finish_load()
    assert names(e.step()) == {"-", "a", "b"}
    finish(e)


def test_a_load_that_fails_ends_those_that_wait_for_it_and_nobody_else() -> None:
    e = engine(num_slots=2, auto_load=False)
    for name in ("a", "a2", "b", "-"):
        add(e, name, n=2 if name == "a2" else 1)
    e.step()
    e.finish_load(1)
    e.step()
    e.finish_load(0, ok=False)
    assert {event.request_id for event in e.events if event.finish_reason} == {"a", "a2"}
    for name in ("a", "a2"):
        assert e.requests[name].finish_reason is FinishReason.ABORT
        assert e.requests[name].stop_reason == "broken"
    assert e.scheduler.adapter_failed("nobody", "why") == []
    e.auto_load = True
    add(e, "a3")  # L056: the next good load works
    finish(e)
    assert e.requests["a3"].finish_reason is FinishReason.LENGTH


def test_a_request_that_ends_while_its_adapter_loads() -> None:
    e = engine(auto_load=False)
    add(e, "a")
    e.step()
    e.abort("a")
    assert not e.scheduler.waiting_for_adapters
    e.finish_load()
    add(e, "a2")
    assert names(e.step()) == {"a2"}
    finish(e)


def test_a_name_that_is_served_by_the_base_model_needs_no_slot() -> None:
    e = engine(num_slots=1, auto_load=False)
    e.add("x", [1, 2], adapter="a", version=None, max_tokens=3, ignore_eos=True)
    step = e.step()
    assert [(s.adapter_slot, s.adapter_start) for s in step.sequences] == [(0, 0)]
    assert step.adapter_generations == ()
    assert e.scheduler.adapter_counters()["a"].num_running == 1
    finish(e)


def test_an_adapter_that_is_on_from_a_position() -> None:
    e = engine(max_num_batched_tokens=4)
    request = e.add("x", list(range(1, 12)), adapter="a", adapter_start=6, max_tokens=5, ignore_eos=True)
    assert request.cache_key == ("a-1", 6)
    e.run()
    assert {s.adapter_start for step in e.steps for s in step.sequences} == {6}
    finish(e)


def test_what_no_slot_could_ever_hold_is_refused_with_the_numbers() -> None:
    e = engine(num_slots=2, device_bytes=100, adapter_bytes={"a-1": 101, "b-1": 60, "c-1": 60})
    with pytest.raises(ValueError, match="adapter: it needs 101 bytes on the device; device_bytes is 100"):
        add(e, "a")
    with pytest.raises(ValueError, match="base model only"):
        add(ScriptedEngine(toy_layout(9)), "a")
    assert not e.scheduler.has_work
    add(e, "b")
    add(e, "c")  # one after the other
    finish(e)
    assert e.loaded == ["b-1", "c-1"]


def test_bytes_are_asked_for_by_true_size() -> None:
    sizes = {"a-1": 50, "b-1": 30, "c-1": 20, "d-1": 90}
    e = engine(num_slots=8, device_bytes=100, adapter_bytes=sizes)
    for name in "abcd":
        add(e, name)
    e.step()
    assert e.scheduler.adapters.num_bytes == 100  # three of eight slots, and all bytes
    finish(e)
    assert e.scheduler.adapters.ready_ids == ["d-1"]


# ---- the recipes


def test_l001_a_slot_in_use_is_never_given_away() -> None:
    """A and B decode while C, D, ... come and go: their tokens, and each step's generations, are right."""
    for depth in (1, 2):
        e = engine(num_slots=3, depth=depth, max_num_batched_tokens=8, max_model_len=128, num_slabs=90)
        add(e, "a", max_tokens=60)
        add(e, "b", max_tokens=60)
        for index in range(60):
            if index % 3 == 0:
                add(e, "cdefg"[index // 3 % 5] + str(index), max_tokens=2)
            e.step()
        finish(e)
        assert len(e.loaded) > 10
        generations = {generation for step in e.steps for _, generation in step.adapter_generations}
        assert max(generations) > 5
        slots = [dict(step.adapter_generations) for step in e.steps if {"a", "b"} & names(step)]
        assert all(slot.get(1) == 1 or slot.get(2) == 1 for slot in slots)


def test_l001_a_step_in_flight_keeps_its_adapter() -> None:
    e = engine(num_slots=1, depth=2, auto_load=False)
    add(e, "a", max_tokens=8)
    e.step()
    e.finish_load()
    e.plan()
    e.plan()
    e.abort("a")
    add(e, "b")
    e.finish_step()
    assert e.plan() is None
    assert not e.loading, "the second step still computes with a"
    e.finish_step()
    assert e.plan() is None
    assert [load.evicted for load in e.loading] == [(1,)]
    e.auto_load = True
    finish(e)


def test_l049_many_cycles_of_load_run_unload() -> None:
    e = engine(num_slots=2)
    for cycle in range(50):
        for name in (f"a{cycle}", f"b{cycle}"):
            add(e, name, version=cycle)
        for _ in range(cycle % 7):
            e.step()
        e.drop(f"a-{cycle}")  # while it waits, loads, runs, or after that
        finish(e)
        e.drop(f"a-{cycle}")
        e.drop(f"b-{cycle}")
        e.check_drained()
        assert (e.scheduler.adapters.ready_ids, e.scheduler.adapters.num_bytes, e.device) == ([], 0, {})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_slabs", [60, 8])
def test_l050_users_are_zero_after_every_way_to_end(depth: int, num_slabs: int) -> None:
    e = engine(depth=depth, num_slabs=num_slabs, max_num_batched_tokens=6, max_num_seqs=4)

    def aborted_after(num_steps: int, request_id: str) -> None:
        for _ in range(num_steps):
            e.step()
        e.abort(request_id)

    add(e, "a1")  # a normal end
    e.run()
    with pytest.raises(ValueError, match="prompt: is empty"):
        add(e, "a2", num_prompt=0)
    add(e, "a3", num_prompt=20)
    aborted_after(0, "a3")
    add(e, "a4", num_prompt=20)
    aborted_after(2, "a4")  # within its prompt
    add(e, "a5", max_tokens=20)
    aborted_after(5, "a5")
    for num_steps in range(6):
        name = f"a{6 + num_steps}"
        add(e, name, n=4, max_tokens=3)
        add(e, f"b{num_steps}", n=4, max_tokens=6, stop_token_ids=tuple(range(10)))
        aborted_after(num_steps, name)
        e.scheduler.check_integrity()
        for index in range(1, 4):
            e.abort(f"{name}#{index}")
    add(e, "a90", max_tokens=9)
    for _ in range(3):
        e.step()
    if e.requests["a90"].status is RequestStatus.RUNNING:
        e.scheduler.preempt(e.requests["a90"])
    add(e, "a91", n=4, max_tokens=5)
    e.step()
    e.restart()
    e.scheduler.check_integrity()
    finish(e)
    e.drop("a-1")
    e.drop("b-1")
    assert not e.device


def test_l050_continuations_hold_the_slot_of_a_parent_that_ended() -> None:
    e = engine(num_slots=1)
    add(e, "a", n=3, max_tokens=6)
    e.step()
    assert e.step() is not None
    add(e, "b")
    e.abort("a")
    e.abort("a#1")
    e.step()
    assert e.scheduler.adapters.slot_of("a-1") == 1
    finish(e)
    parent = engine(num_slots=1)
    add(parent, "a", n=3, max_tokens=6)
    parent.step()
    parent.step()
    parent.restart()
    finish(parent)


def test_l050_a_parent_that_ends_before_the_fork_keeps_the_slot_for_its_children() -> None:
    e = engine(num_slots=1)
    add(e, "a", n=3, max_tokens=6)
    while not e.steps:
        e.step()
    e.abort("a")  # what it computed, its children fork in the next step
    add(e, "b")
    e.step()
    assert e.scheduler.counters.num_forks == 2
    finish(e)


def test_l052_a_name_with_new_content_while_the_old_one_decodes() -> None:
    for num_slots in (1, 2):
        e = engine(num_slots=num_slots, depth=2)
        add(e, "n1", max_tokens=12, version=1)
        for _ in range(4):
            e.step()
        add(e, "n2", max_tokens=12, version=2)
        add(e, "n3", max_tokens=2, version=1)
        finish(e)  # each is what it would be alone, with its own content
        assert e.requests["n1"].output_ids != e.requests["n2"].output_ids
        assert e.loaded[:2] == ["n-1", "n-2"]


def test_l054_never_more_adapters_in_a_step_than_slots_and_base_counts_not() -> None:
    num_crowded = 0
    for seed in range(20):
        rng = random.Random(seed)
        e = engine(num_slots=2, depth=1 + seed % 2, max_num_batched_tokens=5)
        add(e, "a", num_prompt=30)  # in chunks
        add(e, "b", max_tokens=20)
        for _ in range(3):
            e.step()
        add(e, "c")
        add(e, "-")
        for index in range(30):
            if rng.random() < 0.3:
                add(e, rng.choice("abc-") + str(index), num_prompt=rng.randint(1, 12))
            if rng.random() < 0.2:
                e.abort(rng.choice(sorted(e.requests)))
            e.step()  # the harness checks every step
        finish(e)
        num_crowded += sum(len({s.adapter_slot for s in step.sequences}) == 3 for step in e.steps)
    assert num_crowded > 50, "two adapters and the base model"


@pytest.mark.parametrize("fair_share", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2])
def test_l055_an_endless_stream_for_one_adapter(depth: int, policy: str, fair_share: bool) -> None:
    """One slot: B starts within a quantum, the requests that run and the load; C blocks no base request."""
    e = engine(num_slots=1, depth=depth, policy=policy, fair_share=fair_share, max_num_seqs=4)
    quantum, length = 16, 12
    for index in range(6):
        add(e, f"a{index}", max_tokens=length)
    for _ in range(5):
        e.step()
    begin = len(e.steps)
    add(e, "b", max_tokens=2)
    add(e, "c", max_tokens=2)
    for index in range(6, 150):
        add(e, f"a{index}", max_tokens=length)
        if index % 10 == 0:
            add(e, f"-{index}", max_tokens=2)
        e.step()
    first = first_steps(e)
    bound = begin + quantum + length + 2 * depth
    assert first["b"] <= bound
    assert first["c"] <= bound + quantum + length + 2 * depth
    if fair_share:  # base requests keep flowing; in order of arrival, they have their turn with the stream's
        assert max(first[f"-{index}"] - (index - 6) for index in range(10, 140, 10)) < begin + 40
    finish(e)
    assert e.scheduler.counters.num_preemptions == 0  # nobody who runs pays for it


def test_l055_slots_do_not_thrash() -> None:
    """Two endless streams and one slot: it changes hands once a quantum, not once a request."""
    e = engine(num_slots=1, max_num_batched_tokens=50, max_num_seqs=2)
    for index in range(200):
        for name in "ab":
            add(e, f"{name}{index}", max_tokens=2)
    e.run()
    tokens = 2 * 200 * (3 + 1)
    assert 5 < len(e.loaded) <= tokens / 50 + 1
    spans = [len(list(group)) for _, group in itertools.groupby(e.loaded)]
    assert set(spans) == {1}


def test_l058_registered_is_not_resident() -> None:
    e = engine(num_slots=1)
    for name in ("a1", "b1", "c1", "d1", "e1", "f1", "a2", "b2", "c2", "d2", "e2", "f2"):
        add(e, name)
        e.run()
        assert e.requests[name].finish_reason is FinishReason.LENGTH
    finish(e)
    assert len(e.loaded) == 12


def test_l059_pins_and_base() -> None:
    e = engine(num_slots=2)
    add(e, "a")
    e.run()
    e.scheduler.pin_adapter("a-1")
    for name in ("b", "c", "-", "d", "a2"):
        add(e, name)
    finish(e)
    assert e.loaded == ["a-1", "b-1", "c-1", "d-1"]
    with pytest.raises(ValueError, match="would pin the last of 2 slots"):
        e.scheduler.pin_adapter("d-1")
    e.scheduler.adapters.unpin("a-1")
    e.scheduler.pin_adapter("d-1")


def test_l059_a_pin_never_shuts_out_a_request_that_waits() -> None:
    e = engine(num_slots=3, device_bytes=100, adapter_bytes={"a-1": 40, "b-1": 80}, auto_load=False)
    add(e, "a", max_tokens=2)
    e.step()
    e.finish_load()
    e.step()
    add(e, "b")
    with pytest.raises(ValueError, match="needs 80 bytes"):
        e.scheduler.pin_adapter("a-1")
    e.auto_load = True
    finish(e)
    add(e, "a2")
    e.run()
    e.scheduler.pin_adapter("a-1")
    with pytest.raises(ValueError, match="needs 80 bytes"):
        add(e, "b2")
    add(e, "a3")  # not beside itself
    finish(e)


# ---- shares


def test_one_adapter_with_a_long_queue_does_not_starve_another() -> None:
    e = engine(num_slots=2, max_num_seqs=4)
    for index in range(300):
        add(e, f"a{index}", max_tokens=5)
    for _ in range(10):
        e.step()
    begin = len(e.steps)
    for index in range(5):
        add(e, f"b{index}", max_tokens=5)
    e.run()
    first = first_steps(e)
    assert first["b0"] <= begin + 7  # one of four had to end
    assert first["b4"] <= begin + 30
    e.check_outputs()


def test_shares_are_of_tokens() -> None:
    """A's requests are five times as long: in the long run, B's come five times as often."""

    def ratio(**options: object) -> float:
        e = engine(num_slots=2, max_num_seqs=2, max_num_batched_tokens=64, **options)
        for index in range(600):
            if index % 4 == 0:  # twice what can be served
                add(e, f"a{index}", num_prompt=1, max_tokens=30)
                add(e, f"b{index}", num_prompt=1, max_tokens=6)
            e.step()
        counters = e.scheduler.adapter_counters()
        return counters["a"].num_computed_tokens / counters["b"].num_computed_tokens

    assert 0.9 < ratio() < 1.1
    assert ratio(fair_share=False) > 4


@pytest.mark.parametrize("fair_share", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_with_one_class_nothing_is_different(policy: str, fair_share: bool) -> None:
    def steps(adapter: bool, **options: object) -> list[object]:
        e = engine(num_slabs=9, max_num_batched_tokens=12, policy=policy, **options)
        if adapter:
            load = e.scheduler.adapters.begin_load("a-1", 1)
            e.loading.append(load)
            e.finish_load()
        rng = random.Random(3)
        for index in range(40):
            name = ("a" if adapter else "-") + str(index)
            priority = rng.randint(-2, 2) if policy == "priority" else 0
            changes = {"priority": priority, "n": rng.choice([1, 1, 2]), "max_tokens": 20}
            add(e, name, rng.randint(1, 9), **changes)
            e.step()
        e.run()
        assert e.scheduler.counters.num_preemptions > 0
        return [[(s.request_id[1:], s.start, s.length) for s in step.sequences] for step in e.steps]

    plain = steps(adapter=False, fair_share=False)
    assert steps(adapter=False, fair_share=fair_share) == plain
    assert steps(adapter=True, fair_share=fair_share) == plain


def test_a_cap_on_what_runs_of_one_adapter() -> None:
    e = engine(max_running_per_adapter=2, max_num_seqs=9)
    for name in ("a1", "a2", "a3", "b1", "-1", "-2", "-3"):
        add(e, name, n=3 if name == "b1" else 1)
    e.step()
    e.step()
    most_base = 0
    while e.scheduler.has_work:
        running = [r.adapter for r in e.scheduler.requests.values() if r.status is RequestStatus.RUNNING]
        assert max(Counter(filter(None, running)).values(), default=0) <= 2
        assert e.scheduler.num_running == len(running)
        most_base = max(most_base, running.count(None))
        e.step()
    assert most_base == 3  # no adapter, no cap
    assert first_steps(e)["b1"] <= 1  # not behind a3
    assert e.scheduler.counters.num_failed_forks > 0
    finish(e)
    with pytest.raises(ValueError, match="max_running_per_adapter: 0"):
        engine(max_running_per_adapter=0)


def test_who_does_not_fit_in_memory_is_waited_for() -> None:
    """No smaller one slips past, of whatever adapter; one that waits for its adapter is passed over."""
    e = engine(num_slabs=4, auto_load=False, max_num_batched_tokens=64)  # three: a slot or four blocks each
    add(e, "-1", num_prompt=6, max_tokens=9)
    e.step()
    add(e, "b", num_prompt=10)
    add(e, "-2", num_prompt=8)  # a slot and three blocks; a slot and two blocks are free
    add(e, "-3", num_prompt=1)
    assert names(e.step()) == {"-1"}
    e.abort("-2")
    assert names(e.step()) == {"-1", "-3"}
    e.auto_load = True
    finish(e)


def test_counters() -> None:
    e = engine(max_num_seqs=2)
    for name in ("a1", "a2", "b1", "-1"):
        add(e, name, num_prompt=3, max_tokens=4, n=2 if name == "b1" else 1)
    for _ in range(3):
        e.step()
    before = e.scheduler.adapter_counters()
    assert sum(c.num_running for c in before.values()) == e.scheduler.num_running == 2
    assert sum(c.num_waiting for c in before.values()) == e.scheduler.num_waiting
    finish(e)
    counters = e.scheduler.adapter_counters()
    assert counters["a"] == (0, 0, 2, 2 * 6, 2 * 4)
    assert counters[BASE] == (0, 0, 1, 6, 4)
    assert (counters["b"].num_finished, counters["b"].num_generated_tokens) == (2, 8)


def test_1000_adapters_4_slots() -> None:
    """What a request costs doesn't depend on how many adapters wait: counted in lines executed."""

    def lines_per_request(num_adapters: int, num_rounds: int) -> float:
        scheduler = Scheduler(
            toy_layout(80),
            max_num_seqs=8,
            max_num_batched_tokens=16,
            max_model_len=64,
            adapters=(slots := AdapterSlots(4)),
            adapter_bytes=lambda adapter_id: 1,
        )
        count = 0

        def trace(frame: object, event: str, arg: object) -> object:
            nonlocal count
            count += event == "line"
            return trace

        num_requests = num_adapters * num_rounds
        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            for index in range(num_requests):
                name = f"n{index % num_adapters}"
                params = SamplingParams(max_tokens=1)
                scheduler.add(Request(str(index), [1, 2], params, 0, name, name))
            while scheduler.has_work:
                step = scheduler.schedule()
                for load in scheduler.take_loads():
                    scheduler.adapter_loaded(load.slot)
                if step is not None:
                    sampled = {name: 1 for s in step.sequences for name in s.samples}
                    scheduler.update(step.step_id, sampled)
        finally:
            sys.settrace(previous)
        slots.check_integrity({})
        return count / num_requests

    few, many = lines_per_request(20, 10), lines_per_request(1000, 1)
    assert many < 2 * few + 100


def test_who_had_started_goes_on_before_others_start() -> None:
    """A is far ahead, but a preempted request of it has had its turn."""
    e = engine(max_num_seqs=2)
    add(e, "a1", num_prompt=14, max_tokens=20)
    add(e, "b1", num_prompt=1, max_tokens=30)
    add(e, "b2", num_prompt=1)
    add(e, "a2")
    for _ in range(4):
        e.step()
    counters = e.scheduler.adapter_counters()
    assert counters["a"].num_computed_tokens > counters["b"].num_computed_tokens + 5
    e.scheduler.preempt(e.requests["a1"])
    assert names(e.step()) == {"a1", "b1"}
    e.abort("a1")
    assert names(e.step()) == {"b1", "b2"}
    finish(e)


def test_what_had_started_goes_on_though_its_adapter_yields() -> None:
    e = engine(num_slots=1, max_num_batched_tokens=8)
    for name in ("a1", "a2", "b", "a3"):
        add(e, name, num_prompt=6, max_tokens=12)
    while not e.scheduler._turns._yielding:
        e.step()
    e.scheduler.preempt(e.requests["a1"])
    add(e, "a4")
    assert "a1" in names(e.step())
    finish(e)
    first = first_steps(e)
    assert first["b"] < min(first["a3"], first["a4"])
    assert e.loaded == ["a-1", "b-1", "a-1"]


def test_a_turn_is_taken_back_when_nobody_waits_for_it() -> None:
    e = engine(num_slots=1, max_num_batched_tokens=8)
    for name in ("a1", "a2", "b", "a3"):
        add(e, name, num_prompt=6, max_tokens=12)
    while not e.scheduler._turns._yielding:
        e.step()
    assert "a3" not in names(e.step())
    e.abort("b")
    assert "a3" in names(e.step())
    finish(e)
    assert e.loaded == ["a-1"]


def test_one_yields_and_it_is_the_one_furthest_ahead() -> None:
    e = engine(num_slots=2, max_num_batched_tokens=20, max_num_seqs=8)
    e.add("a0", [1] * 10, adapter="a", version=None, max_tokens=1)  # only this sets a apart from b
    add(e, "b1", max_tokens=40)
    add(e, "a1", max_tokens=40)
    while len(e.loaded) < 2:
        e.step()
    add(e, "d", max_tokens=2)
    while not e.scheduler._turns._yielding:
        e.step()
    for _ in range(3):
        e.step()
        assert e.scheduler._turns._yielding == {"a-1"}
    add(e, "a2", max_tokens=30)
    add(e, "b2", max_tokens=30)
    assert names(e.step()) == {"a1", "b1", "b2"}
    finish(e)
    assert e.loaded == ["b-1", "a-1", "d-1", "a-1"]


def test_what_has_started_and_waits_does_not_keep_others_from_their_turn() -> None:
    e = engine(num_slots=1, max_num_batched_tokens=16)
    add(e, "a0", num_prompt=6, max_tokens=12)
    e.run()
    add(e, "a1", max_tokens=12)
    for _ in range(4):
        e.step()
    add(e, "b")
    add(e, "a2")
    e.scheduler.preempt(e.requests["a1"])  # nobody uses the adapter now
    assert names(e.step()) == {"a1"}
    assert e.steps[-1].num_tokens + e.requests["a2"].num_prompt <= 16
    finish(e)
    assert e.loaded == ["a-1", "b-1", "a-1"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_a_long_queue_of_short_answers_yields_after_so_many_steps(max_num_seqs: int, depth: int) -> None:
    """Long before its tokens reach a quantum of thousands."""
    length = 8
    e = engine(num_slots=1, depth=depth, max_num_seqs=max_num_seqs, max_num_batched_tokens=8192)
    for index in range(300):
        add(e, f"a{index}", max_tokens=length)
    for _ in range(5):
        e.step()
    begin = len(e.steps)
    for name in ("b", "c"):
        add(e, name, max_tokens=length)
    while not {"b", "c"} <= set(first_steps(e)):
        e.step()
    first = first_steps(e)
    bound = QUANTUM_STEPS + length + 2 * depth + 2
    assert first["b"] - begin <= bound
    assert first["c"] - begin <= 2 * bound
    assert e.loaded.count("a-1") <= 2
