"""Why a prompt's tokens were computed: each has one cause, and with those that were saved they are all."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.core import prefix_misses
from hybridserve.core.prefix_index import PrefixIndex
from hybridserve.core.prefix_misses import EvictedPaths, Miss
from tests.harness.scripted import ScriptedEngine, toy_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
SIZE = 4


def engine(num_slabs: int = 60, depth: int = 1, *, kind: str = "hybrid", **limits: Any) -> ScriptedEngine:
    options = {"prefix_caching": True, "max_num_batched_tokens": 64, "max_model_len": 200, **limits}
    return ScriptedEngine(toy_layout(num_slabs, kind=kind), depth, **options)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(31) for _ in range(count)]


def counts(e: ScriptedEngine) -> dict[str, int]:
    counters = e.scheduler.cache.prefix.counters
    misses = {str(miss): count for miss, count in counters.missed_tokens.items() if count}
    hits = sum(counters.hit_tokens.values())
    assert hits + sum(misses.values()) == counters.num_queried_tokens
    return {**misses, "hit": hits} if hits else misses


def serve(
    e: ScriptedEngine, name: str, prompt: Sequence[int], max_tokens: int = 2, **more: Any
) -> dict[str, int]:
    """To its end; what it adds to the counts."""
    before = counts(e)
    e.add(name, prompt, max_tokens=max_tokens, ignore_eos=True, **more)
    e.run()
    return {name: count for name in counts(e) if (count := counts(e)[name] - before.get(name, 0))}


@KINDS
def test_new_and_known_and_what_is_after_the_last_block(kind: str) -> None:
    e = engine(kind=kind)
    assert serve(e, "a", tokens(22)) == {"new": 20, "remainder": 2}
    assert serve(e, "b", tokens(22)) == {"hit": 20, "remainder": 2}
    assert serve(e, "longer", [*tokens(22), *tokens(12, seed=1)])["hit"] == 20


def test_a_prompt_of_less_than_a_block() -> None:
    e = engine()
    assert serve(e, "a", tokens(SIZE)) == {"short": SIZE}
    assert serve(e, "b", tokens(SIZE + 1, seed=1)) == {"new": SIZE, "remainder": 1}


@KINDS
def test_parted_early_and_no_checkpoint(kind: str) -> None:
    """The second leaves the first in the middle: K and V are there, a state is not, which it then leaves."""
    e = engine(kind=kind)
    prompt = tokens(22)
    serve(e, "a", prompt)
    parted = serve(e, "b", [*prompt[:13], 40, *tokens(8, seed=2)])
    if kind == "kv":
        assert parted == {"hit": 12, "parted": 8, "remainder": 2}
    else:
        assert parted == {"no_checkpoint": 12, "parted": 8, "remainder": 2}
    assert serve(e, "c", [*prompt[:13], 41, *tokens(8, seed=3)]) == {"hit": 12, "parted": 8, "remainder": 2}


def test_the_next_turn_of_a_conversation_has_not_parted() -> None:
    e = engine()
    prompt = tokens(21)
    serve(e, "first", prompt, max_tokens=8)
    answer = e.requests["first"].output_ids
    turn = serve(e, "second", [*prompt, *answer, *tokens(10, seed=4)])
    assert turn == {"hit": 28, "new": 8, "remainder": 3}


@KINDS
def test_what_was_evicted_is_told_from_what_is_new(kind: str) -> None:
    e = engine(kind=kind)
    serve(e, "a", tokens(22))
    e.scheduler.cache.prefix.clear()
    assert serve(e, "b", tokens(22)) == {"evicted": 20, "remainder": 2}
    assert serve(e, "c", tokens(22, seed=1)) == {"new": 20, "remainder": 2}
    e.scheduler.cache.prefix.clear()
    assert serve(e, "d", [*tokens(22)[:10], *tokens(12, seed=5)])["new"] >= 12


def test_evicted_in_part() -> None:
    e = engine(kind="kv")
    serve(e, "a", tokens(22))
    for _ in range(3):
        assert e.scheduler.cache.prefix.evict_block()
    assert serve(e, "b", tokens(22)) == {"hit": 8, "evicted": 12, "remainder": 2}


def test_a_block_that_had_to_make_room_for_its_own_checkpoint() -> None:
    """In a host's memory of one slab."""
    e = engine(num_host_slabs=2)
    serve(e, "a", tokens(22))
    assert e.scheduler.cache.prefix.evict_block()
    assert e.scheduler.cache.prefix.counters.num_spilled_blocks == 1
    assert e.scheduler.cache.prefix.counters.num_vanished_blocks == 1
    assert serve(e, "b", tokens(22))["evicted"] == SIZE


def test_the_memory_of_what_was_evicted_has_an_end() -> None:
    evicted = EvictedPaths(limit=3)
    for path in (1, 2, 3, 1, 4):
        evicted.add(path)
    assert len(evicted) == 3
    assert [path in evicted for path in (1, 2, 3, 4)] == [True, False, True, True]


@KINDS
def test_another_adapter_has_the_same_tokens(kind: str) -> None:
    e = engine(kind=kind, num_slots=2)
    prompt = tokens(22)
    serve(e, "base", prompt)
    assert serve(e, "a", prompt, adapter="A") == {"other_adapter": 20, "remainder": 2}
    assert serve(e, "a again", prompt, adapter="A") == {"hit": 20, "remainder": 2}
    assert serve(e, "b", [*prompt[:12], *tokens(10, seed=6)], adapter="B")["other_adapter"] == 12
    assert serve(e, "other", tokens(22, seed=7), adapter="A") == {"new": 20, "remainder": 2}
    assert serve(e, "its base", tokens(22, seed=7)) == {"other_adapter": 20, "remainder": 2}


def test_the_memory_of_first_blocks_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_misses, "MAX_STARTS", 2)
    e = engine(num_slots=2)
    for seed in range(4):
        serve(e, f"a{seed}", tokens(22, seed=seed), adapter="A")
    assert len(e.scheduler.cache.prefix._misses._starts) == 2
    assert serve(e, "old", tokens(22, seed=0)) == {"new": 20, "remainder": 2}
    assert serve(e, "recent", tokens(22, seed=3)) == {"other_adapter": 20, "remainder": 2}


def test_s028_nothing_is_told_of_another_salt() -> None:
    """/metrics is for all users: a count of what another tenant has would be an answer to a guess."""
    e = engine()
    serve(e, "theirs", tokens(22), cache_salt="one")
    assert serve(e, "ours", tokens(22), cache_salt="two") == {"new": 20, "remainder": 2}
    e.scheduler.cache.prefix.clear()
    assert serve(e, "third", tokens(22), cache_salt="three") == {"new": 20, "remainder": 2}
    assert serve(e, "theirs again", tokens(22), cache_salt="one") == {"evicted": 20, "remainder": 2}


def test_another_request_is_computing_the_same_and_is_too_far_ahead() -> None:
    """Its step is in flight, and was not told to leave a state where the two part."""
    e = engine(depth=2)
    prompt = tokens(62)
    e.add("first", prompt, max_tokens=2, ignore_eos=True)
    e.plan()
    e.add("second", [*prompt[:29], 40, *tokens(4, seed=8)], max_tokens=2, ignore_eos=True)
    e.plan()
    assert counts(e) == {"new": 60, "concurrent": 28, "parted": 4, "remainder": 2 + 2}
    e.run()
    e.check_outputs()


def test_a_prompt_that_is_scored_is_computed_whole() -> None:
    e = engine()
    serve(e, "a", tokens(22))
    assert serve(e, "b", tokens(22), prompt_logprobs=1) == {"scored": 22}


@KINDS
def test_all_tokens_have_one_cause_whatever_comes(kind: str) -> None:
    """In an arena that is short of memory, with adapters, salts, and prompts that share and part."""
    e = engine(24, kind=kind, num_slots=3, max_num_batched_tokens=20, max_num_seqs=4)
    rng = random.Random(5)
    seen = set()
    for index in range(150):
        prompt = tokens(rng.randrange(1, 40), seed=rng.randrange(3))
        prompt += tokens(rng.randrange(0, 20), seed=100 + rng.randrange(8))
        more = {"adapter": rng.choice([None, None, "A"]), "cache_salt": rng.choice([None, None, "salt"])}
        if not rng.randrange(12):
            more["prompt_logprobs"] = 0
        e.add(f"r{index}", prompt, max_tokens=rng.randrange(1, 9), ignore_eos=True, **more)
        for _ in range(rng.randrange(4)):
            e.step()
        seen |= counts(e).keys()
    e.run()
    seen |= counts(e).keys()
    rare = {Miss.CONCURRENT, Miss.OTHER_ADAPTER, *([Miss.NO_CHECKPOINT] if kind == "kv" else [])}
    assert seen >= {*map(str, set(Miss) - rare), "hit"}
    e.check_outputs()
    e.check_drained()


def test_counts_that_forget_the_evicted_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvictedPaths, "add", lambda self, path: None)
    with pytest.raises(AssertionError):
        test_what_was_evicted_is_told_from_what_is_new("hybrid")


def test_counts_across_salts_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PrefixIndex.root
    monkeypatch.setattr(PrefixIndex, "root", lambda self, salt: plain(self, None))
    with pytest.raises(AssertionError):
        test_s028_nothing_is_told_of_another_salt()


@pytest.mark.parametrize("length", [20, 21])  # a multiple of the block size, or not
def test_continuations_that_could_not_fork_are_no_prompts(length: int) -> None:
    """They match all of the prompt, as their next token is known: that is not a hit."""
    e = engine(max_num_seqs=1)
    num_new = 16 if length == 20 else 20
    counted = serve(e, "a", tokens(length), max_tokens=9, n=3)
    assert counted == {"new": num_new, "remainder": length - num_new}
    assert e.scheduler.counters.num_failed_forks == 2
    assert [request.num_cached for request in e.requests.values()] == [0, 0, 0]
    assert e.scheduler.cache.prefix.counters.num_resumed_tokens > 2 * 12
    e.check_outputs()


def test_what_is_found_after_a_preemption_or_a_restart_was_not_asked_for() -> None:
    e = engine()
    serve(e, "a", tokens(22))
    b = e.add("b", tokens(22), max_tokens=12, ignore_eos=True)
    e.step()
    e.scheduler.preempt(b)
    e.step()
    e.restart()
    e.run()
    assert (b.num_cached, b.num_preemptions) == (20, 2)
    assert counts(e) == {"new": 20, "remainder": 4, "hit": 20}
    assert e.scheduler.cache.prefix.counters.num_resumed_tokens == 20
    e.check_outputs()
