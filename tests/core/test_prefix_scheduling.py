"""What the scheduler makes of prefixes: who waits, what is shared, what goes when memory is short."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.core import prefix_index, prefix_waits
from hybridserve.core.prefix_index import PrefixIndex
from hybridserve.core.prefix_writes import MAX_CHECKPOINTS
from hybridserve.core.request import RequestStatus
from hybridserve.core.step import ScheduledSequence, ScheduledStep, UnitCopy
from tests.harness.scripted import ScriptedEngine, toy_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.core.prefix_cache import PrefixCache
    from hybridserve.core.prefix_nodes import Node


def engine(num_slabs: int = 60, depth: int = 1, *, kind: str = "hybrid", **limits: Any) -> ScriptedEngine:
    options = {"prefix_caching": True, "max_num_batched_tokens": 64, "max_model_len": 200, **limits}
    return ScriptedEngine(toy_layout(num_slabs, kind=kind), depth, **options)


def serve(e: ScriptedEngine, name: str, prompt: Sequence[int], max_tokens: int = 3, **more: Any) -> int:
    """To its end; the tokens that were there."""
    request = e.add(name, prompt, max_tokens=max_tokens, ignore_eos=True, **more)
    e.run()
    return request.num_cached


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(31) for _ in range(count)]


@pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_is_computed_once(kind: str, depth: int) -> None:
    e = engine(depth=depth, kind=kind)
    prompt = tokens(21)
    assert [serve(e, name, prompt) for name in "abc"] == [0, 20, 20]
    assert serve(e, "d", prompt[:20]) == (
        16 if kind == "kv" else 0
    )  # all but the last token; none kept there
    assert serve(e, "e", prompt[:20]) == 16
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
@pytest.mark.parametrize("depth", [1, 2])
def test_after_a_restart_what_many_share_is_computed_once_again(kind: str, depth: int) -> None:
    """They have lost their memory, and not because there was too little: others may wait for them."""
    e = engine(depth=depth, kind=kind, max_num_seqs=40, max_num_batched_tokens=200, num_slabs=200)
    shared = tokens(40)
    for index in range(16):
        e.add(f"r{index}", [*shared, index, 1, 2, 3, 4], max_tokens=9, ignore_eos=True)
    while not all(request.output_ids for request in e.requests.values()):
        e.step()
    before = e.num_computed
    e.restart()
    e.run()
    assert e.num_computed - before == 40 + 16 * (5 + 8)
    e.check_outputs()
    e.check_drained()


def test_a_writer_that_is_preempted_after_a_restart_is_waited_for_no_more() -> None:
    e = engine(checkpoint_interval=8)
    for name in "ab":
        e.add(name, tokens(60), max_tokens=3, ignore_eos=True)
    e.step()
    e.restart()
    e.step()
    a, b = e.requests["a"], e.requests["b"]
    prefix = e.scheduler.cache.prefix
    assert (a.status, prefix.holds(b)) == (RequestStatus.RUNNING, True)
    e.scheduler.preempt(a)
    e.step()
    assert not prefix.holds(b)
    e.run()
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_come_together_compute_what_they_share_once(kind: str, depth: int) -> None:
    e = engine(depth=depth, kind=kind, max_num_seqs=40, max_num_batched_tokens=200, num_slabs=200)
    shared = tokens(40)
    for index in range(32):
        e.add(f"r{index}", [*shared, index % 31, index // 31, 1], max_tokens=2, ignore_eos=True)
    e.run()
    assert e.num_computed == 40 + 32 * 3 + 32
    assert e.scheduler.cache.prefix.counters.num_waits >= 31
    e.check_outputs()
    e.check_drained()


def test_a_request_that_comes_later_asks_for_a_checkpoint_ahead() -> None:
    e = engine(max_num_batched_tokens=8)
    prompt = tokens(40)
    e.add("first", prompt, max_tokens=2, ignore_eos=True)
    e.step()
    late = e.add("late", [*prompt[:26], 5, 6, 7], max_tokens=2, ignore_eos=True)
    e.run()
    assert late.num_cached == 24
    e.check_outputs()


def test_nobody_waits_behind_one_that_was_preempted() -> None:
    e = engine(checkpoint_interval=8)
    prompt = tokens(40)
    first = e.add("first", prompt, max_tokens=2, ignore_eos=True)
    late = e.add("late", [*prompt[:26], 5, 6, 7], max_tokens=2, ignore_eos=True)
    e.step()
    prefix = e.scheduler.cache.prefix
    assert prefix.holds(late)
    e.scheduler.preempt(first)
    e.step()
    assert not prefix.holds(late)
    assert late.status is RequestStatus.RUNNING or first.status is RequestStatus.RUNNING
    e.run()
    e.check_outputs()
    again = e.add("again", tokens(60, seed=3), max_tokens=2, ignore_eos=True)
    e.step()
    e.scheduler.preempt(again)
    e.step()
    assert again.num_preemptions == 1
    e.add("last", [*tokens(60, seed=3), 1], max_tokens=2, ignore_eos=True)
    e.step()
    assert not prefix.holds(e.requests["last"])
    e.run()
    e.check_outputs()
    e.check_drained()


def test_a_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_waits, "MAX_WAIT_STEPS", 2)
    e = engine(checkpoint_interval=8)
    prompt = tokens(40)
    e.add("slow", prompt, max_tokens=2, ignore_eos=True)
    late = e.add("late", [*prompt[:38], 1, 1, 1, 1], max_tokens=2, ignore_eos=True)
    for _ in range(2):
        e.step()
        assert e.scheduler.cache.prefix.holds(late)
    e.step()
    assert not e.scheduler.cache.prefix.holds(late)
    assert e.scheduler.cache.prefix.counters.num_waits_given_up == 1
    e.run()
    e.check_outputs()


def test_s028_another_tenant_hits_nothing() -> None:
    e = engine()
    prompt = tokens(21)
    assert serve(e, "a", prompt, cache_salt="one") == 0
    assert serve(e, "b", prompt, cache_salt="two") == 0
    assert serve(e, "c", prompt) == 0
    assert serve(e, "d", prompt, cache_salt="one") == 20
    e.add("e", [*prompt, 1], cache_salt="one", max_tokens=2)
    e.add("f", [*prompt, 2], cache_salt="three", max_tokens=2)
    e.step()
    assert not e.scheduler.cache.prefix.holds(e.requests["f"])  # nor waits for one, which would tell as much
    e.run()
    e.check_outputs()


def test_s028_sees_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PrefixIndex.root
    monkeypatch.setattr(PrefixIndex, "root", lambda self, salt: plain(self, None))
    with pytest.raises(AssertionError):
        test_s028_another_tenant_hits_nothing()


def every_step_advances() -> None:
    """Any chunk, interval, budget and prompt: each step with work advances somebody, and all ends in time."""
    for interval in (4, 6, 8):
        for budget in range(1, 10):
            layout = toy_layout(40, block_size=2)
            e = ScriptedEngine(
                layout,
                max_num_batched_tokens=budget,
                prefix_caching=True,
                checkpoint_interval=interval,
                max_model_len=64,
            )
            for length in range(1, 21):
                request = e.add(f"r{length}", tokens(length, seed=length), max_tokens=2, ignore_eos=True)
                steps = 0
                while request.status is not RequestStatus.FINISHED:
                    step = e.step()
                    steps += 1
                    assert step is not None
                    assert step.num_tokens >= 1
                    # a chunk may end early at each checkpoint
                    assert steps <= -(-length // budget) + length // 4 + 8
            e.check_outputs()


def test_f041_every_step_advances() -> None:
    every_step_advances()


def test_f041_sees_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that would not reach the next checkpoint are put off."""
    plain = ScriptedEngine.plan

    def plan(self: ScriptedEngine) -> ScheduledStep | None:
        cuts = [r.next_cut - r.num_computed for r in self.scheduler.requests.values() if r.next_cut]
        if cuts and min(cuts) > self.scheduler.max_num_batched_tokens:
            return None
        return plain(self)

    monkeypatch.setattr(ScriptedEngine, "plan", plan)
    with pytest.raises(AssertionError):
        every_step_advances()


# ---- memory


def fill(e: ScriptedEngine, count: int = 30, length: int = 17) -> None:
    for index in range(count):
        serve(e, f"fill{index}", tokens(length, seed=1000 + index), 2)


@pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
def test_what_is_kept_counts_as_free(kind: str) -> None:
    """An arena full of what is kept takes as many sequences as an empty one, and preempts nobody for it."""
    running = []
    for is_full in (False, True):
        e = engine(num_slabs=12, kind=kind, max_model_len=40)
        if is_full:
            fill(e)
            assert e.scheduler.cache.usage().num_bytes > 0.5 * e.scheduler.cache.usage().num_usable_bytes
        for index in range(8):
            e.add(f"r{index}", tokens(7, seed=index), max_tokens=2, ignore_eos=True)
        e.step()
        running.append(e.scheduler.num_running)
        e.run()
        assert e.scheduler.counters.num_preemptions == 0
        e.check_outputs()
        e.check_drained()
    assert running[0] == running[1]


def test_a_running_sequence_evicts_before_anybody_is_preempted() -> None:
    e = engine(num_slabs=9, max_model_len=80)
    fill(e)
    e.add("long", tokens(9), max_tokens=70, ignore_eos=True)
    e.run()
    assert e.scheduler.counters.num_preemptions == 0
    e.check_outputs()
    e.check_drained()


def test_f056_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lively conversation and five that come back now and then, in an arena that doesn't hold all."""
    ours = _hit_rate()
    monkeypatch.setattr(prefix_index, "priority", lambda num_tokens, num_bytes, last_used: (True, last_used))
    assert ours >= 0.62
    assert ours >= _hit_rate()


def test_f056_sees_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit refreshes its whole path."""

    def touch(self: PrefixIndex, node: Node) -> None:
        one: Node | None = node
        while one is not None:
            one.last_used = self.clock
            if one.checkpoint is not None:
                one.checkpoint.last_used = self.clock + 1000
            one = one.parent

    before = _hit_rate()
    monkeypatch.setattr(PrefixIndex, "touch", touch)
    assert _hit_rate() < before


def _hit_rate() -> float:
    e = engine(num_slabs=34, max_model_len=400, num_slots=0)
    rng = random.Random(7)
    said = {session: tokens(20, seed=session) for session in range(6)}
    for turn in range(90):
        session = 0 if rng.random() < 0.4 else rng.randrange(1, 6)
        if len(said[session]) > 120:
            said[session] = tokens(20, seed=session)
        prompt = said[session] + tokens(6, seed=500 + turn)
        serve(e, f"t{turn}", prompt, 4)
        said[session] = prompt + e.requests[f"t{turn}"].output_ids
    counters = e.scheduler.cache.prefix.counters
    return sum(counters.hit_tokens.values()) / counters.num_queried_tokens


def test_no_path_has_too_many_checkpoints() -> None:
    e = engine(num_slabs=200, checkpoint_interval=4, max_model_len=190, max_num_batched_tokens=200)
    prompt = tokens(150)
    for index, length in enumerate((150, 20, 60, 90, 110, 130, 40)):
        serve(e, f"r{index}", [*prompt[:length], 1 + index, 2, 3])
        assert e.scheduler.cache.prefix.index.max_checkpoints_on_a_path() <= MAX_CHECKPOINTS
    assert e.scheduler.cache.usage().num_checkpoints > MAX_CHECKPOINTS


def test_f006_what_is_known_of_kv_alone_is_clipped_where_it_is_planned() -> None:
    """Somebody says that all K and V of a prompt are there, and no state."""
    e = engine()
    prompt = tokens(21)
    serve(e, "a", prompt)
    prefix = e.scheduler.cache.prefix
    while prefix.evict_checkpoint():
        pass
    assert prefix.match(e.add("b", prompt, max_tokens=2)).num_tokens == 0
    step = e.step()
    assert step.sequences[0][1:3] == (0, 20)
    assert step.sequences[0].write_from == 20
    assert not step.state_copies
    e.run()
    e.check_outputs()


def test_adapters_and_their_beginnings() -> None:
    """Blocks before an adapter begins to act are the base model's; those after it are its own."""
    e = engine(num_slots=2)
    prompt = tokens(25)
    assert serve(e, "base", prompt) == 0
    assert serve(e, "a", prompt, adapter="A") == 0
    assert serve(e, "a again", prompt, adapter="A") == 24
    assert serve(e, "b", prompt, adapter="B") == 0
    assert serve(e, "a, version 2", prompt, adapter="A", version=2) == 0
    assert serve(e, "base again", prompt) == 24
    assert serve(e, "from 10", prompt, adapter="A", adapter_start=10) == 0  # the base left no state at 8
    assert serve(e, "from 10 again", prompt, adapter="A", adapter_start=10) == 24
    assert serve(e, "from 12", prompt, adapter="A", adapter_start=12) == 8  # which the one before has
    assert serve(e, "from 30", prompt, adapter="B", adapter_start=30) == 24
    e.check_outputs()


def test_prompt_logprobs_need_every_token() -> None:
    e = engine()
    prompt = tokens(21)
    serve(e, "a", prompt)
    assert serve(e, "b", prompt, prompt_logprobs=0) == 0
    assert e.num_computed >= 2 * 21
    e.check_outputs()


def test_a_save_never_hits_a_sequence() -> None:
    sequence = ScheduledSequence("a", 0, 4, (), False, (1,), 5)
    with pytest.raises(ValueError, match="onto another"):
        ScheduledStep(0, (sequence,), state_saves=(UnitCopy(5, 5),))
    with pytest.raises(ValueError, match="null unit"):
        ScheduledStep(0, (sequence,), state_saves=(UnitCopy(5, 0),))
    ScheduledStep(0, (sequence,), state_saves=(UnitCopy(5, 6),))


def test_off_keeps_nothing() -> None:
    e = engine(prefix_caching=False)
    prompt = tokens(21)
    assert [serve(e, name, prompt) for name in "ab"] == [0, 0]
    assert e.scheduler.cache.usage().num_bytes == 0
    assert not any(step.state_saves or step.state_copies for step in e.steps)


def test_forks_and_equal_prompts_share() -> None:
    e = engine(num_slabs=100)
    prompt = tokens(22)
    for name in "abc":
        e.add(name, prompt, n=3, max_tokens=4, ignore_eos=True)
    e.run()
    assert e.num_computed <= 22 + 2 * 2 + 9 * 4
    e.check_outputs()
    e.check_drained()


def test_integrity_sees_a_lost_waiter() -> None:
    e = engine(checkpoint_interval=8)
    prompt = tokens(40)
    for name in ("first", "late"):
        e.add(name, prompt, max_tokens=2)
    e.step()
    prefix: PrefixCache = e.scheduler.cache.prefix
    prefix._waits._waiters.clear()
    with pytest.raises(RuntimeError, match="waits for nothing"):
        e.scheduler.check_integrity()


@pytest.mark.parametrize(("kind", "num_slabs"), [("hybrid", 4), ("state", 3)])
def test_a_slab_of_one_slot_changes_hands_between_checkpoints(kind: str, num_slabs: int) -> None:
    """To give up the former end of a turn empties its slab; the new end takes it again."""
    e = engine(num_slabs, kind=kind)
    assert e.layout.slots_per_slab == 1
    request = e.add("a", tokens(3), max_tokens=12, ignore_eos=True)
    e.run()
    counters = e.scheduler.cache.prefix.counters
    assert counters.num_replaced_checkpoints > 0
    assert counters.num_skipped_checkpoints == 0
    assert serve(e, "next turn", [*tokens(3), *request.output_ids], max_tokens=1) == 12


@pytest.mark.parametrize("swap", [False, True])
def test_what_it_computed_before_a_preemption_is_not_trusted_either(swap: bool) -> None:
    e = engine(num_host_slabs=20 if swap else 0, preemption="swap" if swap else "recompute")
    request = e.add("wrong", tokens(21), max_tokens=12, ignore_eos=True)
    while len(request.output_ids) < 4:
        e.step()
    e.scheduler.preempt(request)
    while len(request.output_ids) < 6:  # it goes on after its own blocks
        e.step()
    assert request.num_preemptions == 1
    e.scheduler.distrust("wrong")
    e.abort("wrong")
    assert serve(e, "again", tokens(21)) == 0


@pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_not_trusted_is_not_found(kind: str, depth: int) -> None:
    """By those who come, nor by those who are here; what was there before stays good."""
    e = engine(kind=kind, depth=depth, max_num_batched_tokens=20, max_num_seqs=1)
    prompt = tokens(40)
    for more in (1, 2):  # the second leaves a state where they part
        serve(e, f"before {more}", [*prompt[:12], more, more, more, more, more])
    e.add("wrong", prompt, max_tokens=9, ignore_eos=True)
    e.step()
    e.add("here", [*prompt, 1], max_tokens=2, ignore_eos=True)
    while len(e.requests["wrong"].output_ids) < 3:
        e.step()
    e.scheduler.distrust("wrong")
    e.abort("wrong")
    assert serve(e, "again", prompt) == 36
    assert e.requests["here"].num_cached == 12
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
@pytest.mark.parametrize("depth", [1, 2])
def test_b010_abort_at_every_chunk_boundary(kind: str, depth: int) -> None:
    """Who comes after with the same prompt gets what it would have got alone, and something is reused."""
    prompt, reused = tokens(62), []
    for num_steps in range(10):
        e = engine(depth=depth, kind=kind, max_num_batched_tokens=8, checkpoint_interval=8)
        e.add("gone", prompt, max_tokens=20, ignore_eos=True)
        for _ in range(num_steps):
            e.step()
        e.abort("gone")
        reused.append(serve(e, "next", [*prompt, 1]))
        e.check_outputs()
        e.check_drained()
    assert reused == sorted(reused)
    assert reused[0] == 0 < reused[-1]
