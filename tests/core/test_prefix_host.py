"""Prefixes that the arena has no room for: what falls to the host's memory, and how it comes back."""

from __future__ import annotations

import random
from array import array
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.core import host_tier
from hybridserve.core.prefix_cache import PrefixCache
from hybridserve.core.prefix_host import PrefixHost
from hybridserve.core.prefix_index import PrefixIndex
from hybridserve.core.prefix_writes import MAX_CHECKPOINTS
from tests.harness.scripted import ScriptedEngine, toy_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.core.prefix_nodes import Node


def engine(num_slabs: int = 40, depth: int = 1, *, kind: str = "hybrid", **limits: Any) -> ScriptedEngine:
    options = {
        "prefix_caching": True,
        "num_host_slabs": 40,
        "max_num_batched_tokens": 64,
        "max_model_len": 100,
        **limits,
    }
    return ScriptedEngine(toy_layout(num_slabs, kind=kind), depth, **options)


def serve(e: ScriptedEngine, name: str, prompt: Sequence[int], max_tokens: int = 3, **more: Any) -> int:
    """To its end; the tokens that were there."""
    request = e.add(name, prompt, max_tokens=max_tokens, ignore_eos=True, **more)
    e.run()
    return request.num_cached


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(31) for _ in range(count)]


def fall(e: ScriptedEngine, count: int = 1000) -> None:
    """The arena needs the room."""
    prefix = e.scheduler.cache.prefix
    for _ in range(count):
        if not (prefix.evict_block() or prefix.evict_checkpoint()):
            break
    e.scheduler.check_integrity()


def path(e: ScriptedEngine, prompt: Sequence[int]) -> list[Node]:
    """The nodes of a prompt's full blocks."""
    size, nodes = e.layout.block_size, []
    node = e.scheduler.cache.prefix.index._top.children[b""]
    for end in range(size, len(prompt) + 1, size):
        node = node.children[array("i", prompt[end - size : end]).tobytes()]
        nodes.append(node)
    return nodes


@pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_evicted_is_found_on_the_host(kind: str, depth: int) -> None:
    e = engine(depth=depth, kind=kind)
    prompt = tokens(21)
    serve(e, "a", prompt)
    fall(e)
    usage = e.scheduler.cache.usage()
    assert (usage.num_blocks, usage.num_slots) == (0, 0)
    assert serve(e, "b", [*prompt, 1, 2]) == 20
    step = next(step for step in e.steps if step.sequences[0].request_id == "b")
    assert len(step.swaps_out.blocks) == len(step.swaps_in.blocks) == (0 if kind == "state" else 5)
    assert len(step.swaps_in.slots) == (kind != "kv")
    assert step.sequences[0][1:3] == (20, 3)
    counters = e.scheduler.cache.prefix.counters
    assert counters.num_found_blocks == counters.num_spilled_blocks == len(step.swaps_in.blocks)
    assert counters.num_found_checkpoints == (kind != "kv")
    assert counters.num_vanished_blocks == counters.num_vanished_checkpoints == 0
    e.check_outputs()
    e.check_drained()


def test_k_and_v_are_in_one_place_and_a_checkpoint_may_stay() -> None:
    e = engine()
    prompt = tokens(21)
    serve(e, "a", prompt)
    fall(e)
    nodes = path(e, prompt)
    assert all(node.host_block and not node.block for node in nodes)
    assert nodes[-1].has_hosted_checkpoint
    e.add("b", [*prompt, 1, 2], max_tokens=3, ignore_eos=True)
    e.plan()
    assert all(node.num_host_readers == 1 for node in nodes)
    e.finish_step()
    assert all(node.block and not node.host_block for node in nodes)
    assert nodes[-1].has_hosted_checkpoint
    assert e.scheduler.cache.host.bytes_by_kind()["prefix_blocks"] == 0
    assert e.scheduler.cache.host.bytes_by_kind()["checkpoints"] == e.layout.slot_stride
    e.run()
    assert serve(e, "c", [*prompt, 3]) == 20  # K and V are shared, the state comes from the host again
    assert e.scheduler.cache.prefix.counters.num_found_blocks == 5
    assert e.scheduler.cache.prefix.counters.num_found_checkpoints == 2
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("kind", ["hybrid", "kv"])
@pytest.mark.parametrize("num_gone", [1, 2, 3, 4])
def test_a_match_may_lead_from_the_arena_to_the_host(kind: str, num_gone: int) -> None:
    e = engine(kind=kind)
    prompt = tokens(21)
    serve(e, "a", prompt)
    fall(e, num_gone)
    assert sum(node.host_block > 0 for node in path(e, prompt)) == num_gone
    assert serve(e, "b", [*prompt, 1]) == 20
    step = next(step for step in e.steps if step.sequences[0].request_id == "b")
    assert len(step.swaps_in.blocks) == num_gone
    e.check_outputs()
    e.check_drained()


def test_blocks_after_the_last_checkpoint_stay_where_they_are() -> None:
    e = engine()
    prompt = tokens(21)
    serve(e, "a", prompt)
    serve(e, "b", [*prompt[:12], 5, 5, 5, 5, 5])  # they part after three blocks; a checkpoint there
    serve(e, "c", [*prompt[:12], 6])
    e.scheduler.cache.prefix.evict_checkpoint()
    fall(e)
    nodes = path(e, prompt[:12])
    last = nodes[-1].children[array("i", prompt[12:16]).tobytes()]
    assert nodes[-1].has_hosted_checkpoint
    assert last.host_block
    assert serve(e, "d", [*prompt[:16], 7]) == 12
    step = next(step for step in e.steps if step.sequences[0].request_id == "d")
    assert len(step.swaps_in.blocks) == 3
    e.check_outputs()
    e.check_drained()


def test_a_checkpoint_alone_falls_and_is_read_beside_blocks_of_the_arena() -> None:
    e = engine()
    prompt = tokens(21)
    serve(e, "a", prompt)
    assert e.scheduler.cache.prefix.evict_checkpoint()
    nodes = path(e, prompt)
    assert nodes[-1].has_hosted_checkpoint
    assert all(node.block and not node.host_block for node in nodes)
    assert not e.scheduler.cache.prefix.index.has_useless_block
    assert serve(e, "b", prompt) == 20
    step = next(step for step in e.steps if step.sequences[0].request_id == "b")
    assert (step.swaps_in.blocks, len(step.swaps_in.slots), step.state_copies) == ((), 1, ())
    e.check_outputs()
    e.check_drained()


def test_what_saves_nothing_does_not_take_the_hosts_room() -> None:
    """K and V after the last checkpoint of their path."""
    e = engine()
    serve(e, "a", tokens(21), max_tokens=1)
    prefix = e.scheduler.cache.prefix
    prefix.drop(path(e, tokens(21))[-1])
    assert prefix.index.has_useless_block
    fall(e)
    assert prefix.counters.num_evicted_blocks == 5
    assert prefix.counters.num_spilled_blocks == prefix.counters.num_vanished_blocks == 0
    assert set(e.scheduler.cache.host.bytes_by_kind().values()) == {0, 39 * e.layout.slab_bytes}


def test_without_memory_of_the_host_what_is_evicted_is_gone() -> None:
    e = engine(num_host_slabs=0)
    prompt = tokens(21)
    serve(e, "a", prompt)
    fall(e)
    counters = e.scheduler.cache.prefix.counters
    assert (counters.num_spilled_blocks, counters.num_spilled_checkpoints) == (0, 0)
    assert counters.num_vanished_checkpoints == 1
    assert serve(e, "b", prompt) == 0
    e.check_drained()


def test_the_oldest_goes_when_the_host_is_full_too() -> None:
    e = engine(kind="kv", num_slabs=80, num_host_slabs=11)
    prompts = [tokens(21, seed=seed) for seed in range(3)]
    for index, prompt in enumerate(prompts):
        serve(e, f"r{index}", prompt, max_tokens=1)
        fall(e)
    counters = e.scheduler.cache.prefix.counters
    assert counters.num_vanished_blocks == 5
    assert [serve(e, f"s{index}", prompt, max_tokens=1) for index, prompt in enumerate(prompts)] == [
        0,
        20,
        20,
    ]
    e.check_outputs()


def test_a_step_copies_so_much_of_it_and_the_rest_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    e = engine(kind="kv", num_slabs=80)
    monkeypatch.setattr(host_tier, "MAX_KEPT_BYTES", 3 * e.layout.block_stride)
    prompt = tokens(21)
    serve(e, "a", prompt)
    fall(e)
    counters = e.scheduler.cache.prefix.counters
    assert (counters.num_spilled_blocks, counters.num_vanished_blocks) == (3, 2)
    assert serve(e, "b", prompt) == 0  # the first blocks of the path went last
    e.check_outputs()


def test_both_tiers_count_towards_the_checkpoints_of_a_path() -> None:
    e = engine(num_slabs=200, num_host_slabs=100, checkpoint_interval=4, max_model_len=190)
    prompt = tokens(150)
    for index, length in enumerate((150, 20, 60, 90, 110, 130, 40)):
        serve(e, f"r{index}", [*prompt[:length], 1 + index, 2, 3])
        e.scheduler.cache.prefix.evict_checkpoint()
        e.scheduler.cache.prefix.evict_checkpoint()
        e.scheduler.check_integrity()
        assert e.scheduler.cache.prefix.index.max_checkpoints_on_a_path() <= MAX_CHECKPOINTS
    assert e.scheduler.cache.prefix.counters.num_spilled_checkpoints > 4


@pytest.mark.parametrize("depth", [1, 2])
def test_two_that_read_the_same_at_once(depth: int) -> None:
    e = engine(depth=depth)
    prompt = tokens(21)
    serve(e, "a", prompt)
    fall(e)
    for name in "bcd":
        e.add(name, prompt, max_tokens=4, ignore_eos=True)
    e.run()
    assert [e.requests[name].num_cached for name in "bcd"] == [20] * 3
    e.check_outputs()
    e.check_drained()


def test_what_comes_back_while_another_step_reads_it_on_the_host() -> None:
    e = engine(depth=2)
    prompt = tokens(21)
    serve(e, "a", prompt)
    fall(e)
    e.add("b", prompt, max_tokens=4, ignore_eos=True)
    e.plan()
    e.add("c", prompt, max_tokens=4, ignore_eos=True)
    assert len(e.plan().swaps_in.blocks) == 5
    nodes = path(e, prompt)
    e.finish_step()
    assert all(node.block and node.host_block for node in nodes)
    e.scheduler.check_integrity()
    e.finish_step()
    assert all(node.block and not node.host_block for node in nodes)
    e.run()
    e.check_outputs()
    e.check_drained()


def test_what_the_host_loses_may_make_blocks_of_the_arena_useless() -> None:
    """And then they go before what is older."""
    e = engine()
    index = e.scheduler.cache.prefix.index
    index.clock = 1000
    serve(e, "a", tokens(21), max_tokens=1)
    fall(e, 1)  # the last block, and the checkpoint
    index.clock = 0
    serve(e, "older", tokens(21, seed=1), max_tokens=1)
    nodes = path(e, tokens(21))
    assert [node.num_hosted for node in nodes] == [1] * 5
    assert not index.has_useless_block
    assert index.first_block is not nodes[3]
    e.scheduler.cache.host.clear()
    assert index.has_useless_block
    assert index.first_block is nodes[3]
    e.scheduler.check_integrity()


def test_what_is_read_is_not_given_away_by_the_step_that_reads() -> None:
    """To admit it, the arena evicts more than the host has room for beside what was found there."""
    e = engine(kind="kv", num_slabs=8, num_host_slabs=5, max_model_len=28)  # of one block each
    prompt = tokens(13)
    serve(e, "a", prompt, max_tokens=1)
    fall(e)
    serve(e, "other", tokens(25, seed=1), max_tokens=1)
    assert e.scheduler.cache.usage().num_cached_blocks == 6
    assert serve(e, "b", [*prompt, 1, 2, 3], max_tokens=1) == 12
    assert e.scheduler.cache.prefix.counters.num_vanished_blocks > 0
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
def test_nobody_finds_what_is_not_to_be_trusted(kind: str) -> None:
    e = engine(kind=kind)
    prompt = tokens(21)
    request = e.add("a", prompt, max_tokens=9, ignore_eos=True)
    while not request.output_ids:
        e.step()
    e.scheduler.preempt(request)  # so that its blocks can fall while it lives
    fall(e)
    last = path(e, prompt)[-1]
    assert last.host_block or last.has_hosted_checkpoint
    e.scheduler.distrust("a")
    e.scheduler.check_integrity()
    other = e.add("b", prompt, max_tokens=2, ignore_eos=True)
    assert e.scheduler.cache.prefix.match(other).num_tokens == 0


def test_pressure_of_many_conversations() -> None:
    """Ten that take turns, in an arena that holds two or three of them: with memory of the host all that was
    said is found again."""

    def hits(num_host_slabs: int) -> float:
        e = engine(num_slabs=20, num_host_slabs=num_host_slabs)
        said: dict[int, list[int]] = {}
        for turn in range(30):
            session = turn % 10
            said.setdefault(session, tokens(12, seed=session))
            prompt = said[session] + tokens(5, seed=500 + turn)
            serve(e, f"t{turn}", prompt, 4)
            said[session] = prompt + e.requests[f"t{turn}"].output_ids
        e.check_outputs()
        counters = e.scheduler.cache.prefix.counters
        return sum(counters.hit_tokens.values()) / counters.num_queried_tokens

    assert hits(0) < 0.1
    assert hits(80) > 0.45


# ---- the same with something broken


def test_a_match_that_leaves_out_the_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PrefixCache.begin

    def begin(self: PrefixCache, request: Any, match: Any, plan: Any) -> None:
        plain(self, request, match, plan)
        plan.block_swaps_in.clear()

    monkeypatch.setattr(PrefixCache, "begin", begin)
    with pytest.raises(AssertionError, match="holds another token"):
        test_two_that_read_the_same_at_once(1)


def test_reading_without_holding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixHost, "hold_blocks", lambda self, nodes: None)
    monkeypatch.setattr(PrefixHost, "let_blocks_go", lambda self, nodes: None)
    with pytest.raises((AssertionError, ValueError)):
        test_what_is_read_is_not_given_away_by_the_step_that_reads()


def test_blocks_that_count_as_useless_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes do not know what is below them on the host."""
    monkeypatch.setattr(PrefixIndex, "is_useful", lambda self, node: node.checkpoint is not None)
    with pytest.raises(AssertionError):
        test_what_was_evicted_is_found_on_the_host("hybrid", 1)
