"""A path keeps so many states, however much memory there is: which of them goes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from hybridserve.core import prefix_writes
from hybridserve.core.eviction import priority, rank_on_path
from hybridserve.core.prefix_writes import MAX_CHECKPOINTS
from tests.harness.scripted import ScriptedEngine, toy_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARED = 24


def engine(kind: str, num_host_slabs: int = 0) -> ScriptedEngine:
    return ScriptedEngine(
        toy_layout(400, kind=kind),
        prefix_caching=True,
        max_num_batched_tokens=512,
        max_model_len=900,
        num_host_slabs=num_host_slabs,
    )


def serve(e: ScriptedEngine, name: str, prompt: Sequence[int]) -> int:
    request = e.add(name, prompt, max_tokens=6, ignore_eos=True)
    e.run()
    return request.num_cached


def found_beside_a_long_chat(e: ScriptedEngine, num_turns: int = 10) -> tuple[list[int], list[int]]:
    """Of a system prompt by one fresh chat a turn; and by each turn, what of the turn before is not there."""
    rng = random.Random(1)

    def new(count: int) -> list[int]:
        return [rng.randrange(31) for _ in range(count)]

    system = new(SHARED)
    for name in "xyz":
        serve(e, name, system + new(9))
    said, fresh, lost = [*system, *new(9)], [], []
    for turn in range(num_turns):
        before = len(said)
        said += new(40)
        lost.append(before - serve(e, f"turn {turn}", said))
        said += e.requests[f"turn {turn}"].output_ids
        fresh.append(serve(e, f"fresh {turn}", system + new(9)))
        assert e.scheduler.cache.prefix.index.max_checkpoints_on_a_path() <= MAX_CHECKPOINTS
    e.check_outputs()
    return fresh, lost


@pytest.mark.parametrize("kind", ["hybrid", "state"])
@pytest.mark.parametrize("num_host_slabs", [0, 100])
def test_a_long_chat_leaves_others_their_system_prompt(kind: str, num_host_slabs: int) -> None:
    e = engine(kind, num_host_slabs)
    fresh, lost = found_beside_a_long_chat(e)
    assert fresh == [SHARED] * 10
    assert max(lost[1:]) <= e.layout.block_size  # and the chat goes on where it was
    counters = e.scheduler.cache.prefix.counters
    assert counters.num_over_limit_checkpoints > 5
    assert counters.num_vanished_checkpoints == counters.num_spilled_checkpoints == 0  # there was memory


def test_by_what_it_saves_one_chat_alone_the_system_prompt_would_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_writes, "rank_on_path", lambda num_ways, is_end, worth: worth)
    fresh, _ = found_beside_a_long_chat(engine("hybrid"))
    assert fresh != [SHARED] * 10


def test_a_path_keeps_where_it_ends() -> None:
    """A state is asked for in the middle of a path that is full: its end, which the next turn begins with,
    stays, though it saves the fewest tokens."""
    e = engine("hybrid")
    rng = random.Random(3)
    said: list[int] = []
    for turn in range(6):
        said += [rng.randrange(31) for _ in range(40)]
        serve(e, f"turn {turn}", said)
        said += e.requests[f"turn {turn}"].output_ids
    for length in (60, 120, 180):  # the second to leave there computes a state
        for way in range(2):
            serve(e, f"leaves {length} {way}", [*said[:length], *[way] * 9])
    assert serve(e, "next turn", [*said, 1, 2, 3]) >= len(said) - e.layout.block_size
    assert e.scheduler.cache.prefix.counters.num_over_limit_checkpoints > 0


def test_the_rank_on_a_path() -> None:
    much, little = priority(1000, 100, 5), priority(10, 100, 5)
    order = [(1, True, little), (1, True, much), (1, False, little), (2, True, little), (9, False, little)]
    assert sorted(set(order), key=lambda one: rank_on_path(*one)) == order
