"""Preemption that moves memory to the host's: what is copied when, and what becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.core.host_tier import HostTier
from hybridserve.core.request import Request, RequestStatus
from hybridserve.core.scheduler import Scheduler
from hybridserve.core.step import UnitCopies
from tests.harness.scripted import ScriptedEngine, toy_layout

if TYPE_CHECKING:
    from hybridserve.core.step import ScheduledStep


def engine(num_slabs: int = 40, depth: int = 1, *, kind: str = "hybrid", **limits: Any) -> ScriptedEngine:
    options = {"num_host_slabs": 20, "preemption": "swap", **limits}
    return ScriptedEngine(toy_layout(num_slabs, kind=kind), depth, **options)


def num_copied(copies: UnitCopies) -> tuple[int, int]:
    return len(copies.blocks), len(copies.slots)


def bytes_copied(e: ScriptedEngine) -> int:
    """By all steps, between the host and the arena."""
    return sum(
        len(copies.blocks) * e.layout.block_stride + len(copies.slots) * e.layout.slot_stride
        for step in e.steps
        for copies in (step.swaps_out, step.swaps_in)
    )


def decode(e: ScriptedEngine, name: str, count: int = 2) -> Request:
    while len(e.requests[name].output_ids) < count:
        e.step()
    return e.requests[name]


@pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_f059_all_are_swapped_every_third_step(kind: str, depth: int, prefix_caching: bool) -> None:
    """What is saved is K and V of what was computed, and the state; nothing is computed twice."""
    e = engine(60, depth, kind=kind, prefix_caching=prefix_caching, num_host_slabs=60)
    for index in range(4):
        e.add(f"r{index}", [index + 1] * (3 + 5 * index), max_tokens=12, ignore_eos=True)
    for count in range(1000):
        if not e.scheduler.has_work:
            break
        e.step()
        if count % 3 == 2:
            expected = 0
            running = [r for r in e.requests.values() if r.status is RequestStatus.RUNNING]
            for request in running:
                size = e.layout.blocks_for(request.num_computed) * e.layout.block_stride
                expected += size + e.layout.slot_stride
                e.scheduler.preempt(request)
                assert request.num_computed > 0
            host = e.scheduler.cache.host.bytes_by_kind()
            assert host["sequences"] >= expected > 0 or not running
    e.run()
    e.check_outputs()
    assert e.num_computed == sum(3 + 5 * index + 11 for index in range(4))
    counters = e.scheduler.counters
    assert counters.num_preemptions == counters.num_swaps_out > 10
    assert 0 <= counters.num_swaps_out - counters.num_swaps_in <= 4  # some ended with a token in flight
    assert counters.num_recomputed_instead == 0
    assert counters.num_swap_bytes == bytes_copied(e) > 0
    e.check_drained()


def test_f059_sees_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V are saved, the state isn't."""
    plain = HostTier.take_swaps_out
    monkeypatch.setattr(HostTier, "take_swaps_out", lambda self: plain(self)._replace(slots=()))
    with pytest.raises(AssertionError, match="somebody else's state"):
        test_f059_all_are_swapped_every_third_step("hybrid", 1, prefix_caching=False)


def test_the_copies_of_one_sequence() -> None:
    e = engine()
    e.add("a", [1] * 9, max_tokens=8, ignore_eos=True)
    a = decode(e, "a")
    assert a.num_computed == 10
    blocks, slot = a.block_ids, a.state_slot
    e.scheduler.preempt(a)
    assert (a.status, a.num_computed, a.has_memory) == (RequestStatus.WAITING, 10, False)
    assert (len(a.host_block_ids), a.host_slot > 0) == (3, True)
    host_blocks, host_slot = a.host_block_ids, a.host_slot
    step = e.step()
    assert [copy.source for copy in step.swaps_out.blocks] == list(blocks)
    assert [copy.destination for copy in step.swaps_out.blocks] == list(host_blocks)
    assert step.swaps_out.slots == ((slot, host_slot),)
    assert [copy.source for copy in step.swaps_in.blocks] == list(host_blocks)
    assert [copy.destination for copy in step.swaps_in.blocks] == list(a.block_ids)
    assert step.swaps_in.slots == ((host_slot, a.state_slot),)
    assert step.finished == ("a",)
    assert step.sequences[0][1:3] == (10, 1)
    assert step.sequences[0].has_state
    assert (a.write_from, a.is_swapped_out) == (0, False)
    e.run()
    e.check_outputs()
    e.check_drained()


def test_a_prompt_goes_on_in_the_middle_with_its_checkpoint_still_due() -> None:
    e = engine(max_num_batched_tokens=6, prefix_caching=True)
    e.add("a", [1, 2, 3, 4, 5] * 4, max_tokens=2, ignore_eos=True)
    e.step()
    assert e.requests["a"].num_computed == 6
    e.scheduler.preempt(e.requests["a"])
    e.run()
    assert e.num_computed == 21
    again = e.add("b", [1, 2, 3, 4, 5] * 4, max_tokens=2, ignore_eos=True)
    e.run()
    assert again.num_cached == 16
    e.check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_short_of_memory_is_swapped_and_not_computed_twice(depth: int) -> None:
    e = engine(7, depth)
    for index in range(4):
        e.add(f"r{index}", [index + 1] * 8, max_tokens=14, ignore_eos=True)
    e.run()
    e.check_outputs()
    assert e.scheduler.counters.num_swaps_out == e.scheduler.counters.num_preemptions > 0
    assert e.num_computed == 4 * (8 + 13)


def test_by_cost() -> None:
    """A state weighs as much as many tokens: only who has computed enough of them is worth its bytes."""
    layout = toy_layout(40)
    num_bytes = 4 * layout.block_stride + layout.slot_stride  # after 13 .. 16 tokens
    e = engine(preemption="auto", swap_bytes_per_token=-(-num_bytes // 14), max_num_batched_tokens=64)
    for name, length in (("a", 12), ("b", 13)):
        e.add(name, [1] * length, max_tokens=8, ignore_eos=True)
    e.step()
    a, b = e.requests["a"], e.requests["b"]
    e.step()
    assert (a.num_computed, b.num_computed) == (12 + 1, 13 + 1)
    e.scheduler.preempt(a)
    e.scheduler.preempt(b)
    assert (a.is_swapped_out, a.num_computed) == (False, 0)
    assert (b.is_swapped_out, b.num_computed) == (True, 14)
    assert e.scheduler.counters.num_recomputed_instead == 0  # it was cheaper
    e.run()
    e.check_outputs()


def test_recompute_means_recompute() -> None:
    e = engine(preemption="recompute")
    e.add("a", [1] * 9, max_tokens=8, ignore_eos=True)
    e.scheduler.preempt(decode(e, "a"))
    assert e.requests["a"].num_computed == 0
    assert e.scheduler.counters.num_recomputed_instead == 0
    with pytest.raises(ValueError, match="preemption: 'swap' needs"):
        engine(num_host_slabs=1)


def test_priority_decides_who_is_swapped() -> None:
    e = engine(5, policy="priority", max_num_seqs=3)
    e.add("low", [1] * 8, priority=5, max_tokens=16, ignore_eos=True)
    e.step()
    e.add("high", [2] * 8, priority=0, max_tokens=20, ignore_eos=True)
    e.add("mid", [3] * 8, priority=3, max_tokens=16, ignore_eos=True)
    e.run()
    e.check_outputs()
    assert e.scheduler.counters.num_swaps_out > 0
    assert e.requests["high"].num_preemptions == 0
    assert e.num_computed == sum(r.num_prompt + len(r.output_ids) - 1 for r in e.requests.values())


# ---- no room


def test_a_full_host_means_computing_again_and_is_counted() -> None:
    e = engine(num_host_slabs=3)  # one slab of blocks, one of a slot
    for name in "ab":
        e.add(name, [1] * 9, max_tokens=8, ignore_eos=True)
    decode(e, "b")
    a, b = e.requests["a"], e.requests["b"]
    e.scheduler.preempt(a)
    e.scheduler.preempt(b)
    assert (a.is_swapped_out, b.is_swapped_out, b.num_computed) == (True, False, 0)
    assert e.scheduler.counters.num_recomputed_instead == 1
    e.run()
    e.check_outputs()
    e.check_drained()


def test_prefixes_go_for_sequences_and_never_the_other_way_round() -> None:
    e = engine(8, num_host_slabs=4, prefix_caching=True, max_model_len=28)
    for index in range(9):  # what was computed first falls to the host
        e.add(f"p{index}", [index + 1] * 17, max_tokens=2, ignore_eos=True)
        e.run()
    kinds = e.scheduler.cache.host.bytes_by_kind()
    assert kinds["prefix_blocks"] + kinds["checkpoints"] > e.layout.slab_bytes
    assert kinds["sequences"] == 0
    e.add("a", [9] * 17, max_tokens=8, ignore_eos=True)
    a = decode(e, "a")
    e.scheduler.preempt(a)
    assert a.is_swapped_out
    assert e.scheduler.counters.num_recomputed_instead == 0
    kept = a.host_block_ids
    e.scheduler.cache.prefix.clear()
    assert a.host_block_ids == kept
    e.run()
    e.check_outputs()
    e.check_drained()


# ---- steps in flight


def test_a_copy_whose_step_is_not_frozen_goes_with_the_next() -> None:
    e = engine(depth=2)
    e.add("a", [1] * 9, max_tokens=8, ignore_eos=True)
    decode(e, "a")
    e.plan()
    a = e.requests["a"]
    assert a.num_pending
    e.scheduler.preempt(a)
    assert a.is_swapped_out
    e.finish_step()
    assert a.num_pending
    assert e.plan() is None  # its last token is not known
    e.finish_step()
    step = e.plan()
    assert num_copied(step.swaps_out) == num_copied(step.swaps_in) == (3, 1)
    e.run()
    e.check_outputs()
    assert e.num_computed == 9 + 7


def test_a_copy_that_nobody_wants_any_more_is_not_made() -> None:
    e = engine(depth=2)
    e.add("a", [1] * 9, max_tokens=8, ignore_eos=True)
    e.add("b", [2] * 9, max_tokens=8, ignore_eos=True)
    e.scheduler.preempt(decode(e, "a"))
    e.abort("a")
    assert e.step().swaps_out == UnitCopies()
    e.run()
    assert e.scheduler.counters.num_swap_bytes == 0
    e.check_outputs()
    e.check_drained()


def test_what_a_step_swaps_in_from_is_no_place_to_swap_out_to() -> None:
    """The host has room for one. One goes out while the other comes in; out comes first within a step."""
    e = engine(num_host_slabs=3)
    for name in "ab":
        e.add(name, [1 + (name == "b")] * 9, max_tokens=8, ignore_eos=True)
    decode(e, "b")
    a, b = e.requests["a"], e.requests["b"]
    e.scheduler.preempt(a)
    e.plan()  # a comes in again
    assert a.status is RequestStatus.RUNNING
    e.scheduler.preempt(b)
    assert b.num_computed == 0  # no room as long as that step runs
    e.finish_step()
    e.scheduler.preempt(a)
    assert a.is_swapped_out
    e.run()
    e.check_outputs()
    e.check_drained()


def test_it_is_seen_when_the_host_gives_units_away_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = HostTier.release
    monkeypatch.setattr(HostTier, "release", lambda self, request, step_id=None: plain(self, request))
    with pytest.raises(AssertionError):
        test_what_a_step_swaps_in_from_is_no_place_to_swap_out_to()


def test_a_prompt_that_is_done_in_flight_is_not_queued_again_for_nothing() -> None:
    e = engine(depth=2)
    e.add("a", [1] * 9, max_tokens=0, prompt_logprobs=0)
    e.add("b", [2] * 9, max_tokens=4, ignore_eos=True)
    e.plan()
    e.scheduler.preempt(e.requests["a"])
    e.plan()
    e.run()
    e.check_outputs()
    e.check_drained()


# ---- whatever else happens to it


def swapped(e: ScriptedEngine) -> Request:
    e.add("x", [3, 1, 4, 1, 5, 9], max_tokens=6, ignore_eos=True)
    e.add("y", [2, 7, 1, 8], max_tokens=9, ignore_eos=True)
    x = decode(e, "x")
    while e.scheduler._in_flight:
        e.finish_step()
    e.scheduler.preempt(x)
    assert x.is_swapped_out
    return x


def _out_planned(e: ScriptedEngine) -> None:
    swapped(e)


def _out_in_flight(e: ScriptedEngine) -> None:
    x = swapped(e)
    e.scheduler.max_num_seqs = 1
    step = e.plan()
    assert (step.swaps_out.slots != (), x.is_swapped_out) == (True, True)
    e.scheduler.max_num_seqs = 8


def _in_in_flight(e: ScriptedEngine) -> None:
    swapped(e)
    step = e.plan()
    assert step.swaps_in.slots


def _out_again(e: ScriptedEngine) -> None:
    _in_in_flight(e)
    e.scheduler.preempt(e.requests["x"])
    assert e.requests["x"].is_swapped_out


def _back(e: ScriptedEngine) -> None:
    _in_in_flight(e)
    e.finish_step()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("reach", [_out_planned, _out_in_flight, _in_in_flight, _out_again, _back])
@pytest.mark.parametrize("end", ["abort", "restart", "go on"])
def test_f036_the_end_in_any_state(reach: Any, end: str, depth: int, prefix_caching: bool) -> None:
    """F008: a step that copies it back may fail, too; then it is computed again."""
    e = engine(30, depth, prefix_caching=prefix_caching)
    for _ in range(8):
        e.requests.clear()
        e.events.clear()
        reach(e)
        if end == "abort":
            assert len(e.abort("x")) == 1
            assert e.abort("x") == []
        elif end == "restart":
            e.restart()
            x = e.requests["x"]
            assert (x.is_swapped_out, x.has_memory, x.num_computed) == (False, False, 0)
            assert e.scheduler.cache.host.num_sequences == 0
        e.run()
        e.check_outputs()
        e.check_drained()


def test_f036_sees_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a sequence gives back what it holds of the arena, and no more."""
    monkeypatch.setattr(Scheduler, "_release_all", Scheduler._release)
    with pytest.raises(Exception, match="miscounted"):
        test_f036_the_end_in_any_state(_out_planned, "abort", 1, prefix_caching=False)


def test_f008_sees_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step that failed, what was copied is taken for good."""
    plain = Scheduler.restart

    def restart(self: Scheduler) -> Any:
        before = {r: (r.host_block_ids, r.host_slot, r.num_computed) for r in self.requests.values()}
        unborn = plain(self)
        for request, (blocks, slot, count) in before.items():
            if slot:
                self.cache.host.swap_out(request, [1] * len(blocks), 1)
                self.cache.host.take_swaps_out()
                request.num_computed = count
        return unborn

    monkeypatch.setattr(Scheduler, "restart", restart)
    with pytest.raises(AssertionError):
        test_f036_the_end_in_any_state(_out_planned, "restart", 1, prefix_caching=False)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_parent_that_is_swapped_out_before_its_children_fork(depth: int) -> None:
    e = engine(depth=depth)
    e.add("a", [1] * 9, n=3, max_tokens=5, ignore_eos=True)
    e.plan()  # draws the first tokens
    e.scheduler.preempt(e.requests["a"])
    assert e.requests["a"].is_swapped_out
    e.run()
    e.check_outputs()
    assert e.scheduler.counters.num_failed_forks == 2
    assert e.num_computed == 3 * (9 + 4) - (9 - 9)
    e.check_drained()


def test_a_swapped_parent_may_end_before_its_children_fork() -> None:
    e = engine(depth=2)
    e.add("a", [1] * 9, n=3, max_tokens=5, ignore_eos=True, presence_penalty=0.5)
    e.step()
    e.plan()
    e.scheduler.preempt(e.requests["a"])
    while not e.requests["a"].output_ids:
        e.finish_step()
    e.abort("a")
    e.scheduler.check_integrity()
    e.run()
    e.check_outputs()
    e.check_drained()


def test_a_fork_that_this_step_makes_is_computed_again() -> None:
    """It has nothing before the step's copies, and those come after the swaps out."""
    e = engine()
    e.add("a", [1] * 9, max_tokens=5, ignore_eos=True)
    a = decode(e, "a")
    a.last_step = e.scheduler._next_step_id  # as `StepPlan.fork` sets it
    e.scheduler.preempt(a)
    assert (a.is_swapped_out, a.num_computed) == (False, 0)
    assert e.scheduler.counters.num_recomputed_instead == 1


def test_adapters_go_and_come_back() -> None:
    e = engine(num_slots=1, num_host_slabs=30)
    e.add("a", [1] * 9, max_tokens=6, ignore_eos=True, adapter="A")
    a = decode(e, "a")
    e.scheduler.preempt(a)
    e.add("b", [2] * 9, max_tokens=6, ignore_eos=True, adapter="B")
    e.run()
    e.check_outputs()
    assert e.num_computed == 2 * (9 + 5)
    e.check_drained()


def test_an_adapter_that_is_lost_takes_those_with_it_that_are_swapped_out() -> None:
    e = engine(num_slots=1, auto_load=False)
    e.add("a", [1] * 9, max_tokens=6, ignore_eos=True, adapter="A")
    e.step()
    e.finish_load()
    e.scheduler.preempt(decode(e, "a"))
    e.step()  # in again
    e.scheduler.preempt(e.requests["a"])
    e.events += e.scheduler.adapter_failed("A-1", "broken")
    e.scheduler.check_integrity()
    assert not e.scheduler.has_work
    assert e.scheduler.cache.host.num_sequences == 0


# ---- with prefixes


def test_what_is_in_the_tree_is_shared_again_and_not_copied() -> None:
    e = engine(prefix_caching=True)
    e.add("a", [1, 2, 3, 4, 5] * 2, max_tokens=12, ignore_eos=True)
    a = decode(e, "a", 6)
    assert a.num_computed == 15
    e.scheduler.preempt(a)
    step = e.step()
    assert num_copied(step.swaps_out) == (4, 1)  # whole and private
    assert num_copied(step.swaps_in) == (1, 1)  # three full blocks are still there
    e.run()
    num_bytes = 5 * e.layout.block_stride + 2 * e.layout.slot_stride
    assert e.scheduler.counters.num_swap_bytes == bytes_copied(e) == num_bytes
    e.check_outputs()
    assert e.num_computed == 10 + 11


def test_what_was_swapped_in_is_there_for_others() -> None:
    e = engine(prefix_caching=True)
    prompt = [1, 2, 3, 4, 5] * 3
    e.add("a", prompt, max_tokens=8, ignore_eos=True)
    a = decode(e, "a")
    e.scheduler.preempt(a)
    while e.scheduler.cache.prefix.evict_block():
        pass
    e.scheduler.cache.host.clear()  # the tree has nothing any more, the sequence all
    step = e.step()
    assert num_copied(step.swaps_in) == (4, 1)
    blocks = set(a.block_ids[:4])
    e.step()
    assert blocks == set(e.scheduler.cache.prefix.index.blocks)
    e.run()
    e.check_outputs()
    e.check_drained()


def test_a_block_that_it_has_computed_in_part_is_its_own() -> None:
    """Even where another has computed all of it meanwhile."""
    e = engine(max_num_batched_tokens=6, prefix_caching=True, policy="priority", max_num_seqs=1)
    prompt = [1, 2, 3, 4, 5] * 4
    a = e.add("a", prompt, priority=5, max_tokens=2, ignore_eos=True)
    e.step()
    e.scheduler.preempt(a)
    assert a.num_computed == 6
    e.add("b", prompt, priority=0, max_tokens=2, ignore_eos=True)
    e.run()
    resumed = next(step for step in e.steps if step.sequences[0][:2] == ("a", 6))
    assert num_copied(resumed.swaps_in) == (1, 1)
    e.check_outputs()
    e.check_drained()


def finished(step: ScheduledStep | None) -> tuple[str, ...]:
    return step.finished if step else ()


def test_the_worker_forgets_and_relearns_who_was_swapped() -> None:
    e = engine(depth=2)
    e.add("a", [1] * 9, max_tokens=8, ignore_eos=True)
    e.add("b", [2] * 9, max_tokens=8, ignore_eos=True)
    e.scheduler.preempt(decode(e, "a"))
    assert finished(e.step()) == ("a",)
    e.run()
    e.check_outputs()
