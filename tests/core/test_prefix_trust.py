"""What a request computed or began with when its logits are not finite, and who finds it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.core.prefix_cache import PrefixCache
from tests.harness.scripted import ScriptedEngine, toy_layout

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hybridserve.core.live_requests import TokenEvent
    from hybridserve.core.request import Request

KINDS = pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
SYSTEM = [(place * 7) % 29 + 1 for place in range(64)]


def engine(kind: str = "hybrid", depth: int = 1, **limits: Any) -> ScriptedEngine:
    options = {"max_num_batched_tokens": 16, "checkpoint_interval": 16, "max_model_len": 200, **limits}
    return ScriptedEngine(toy_layout(200, kind=kind), depth, prefix_caching=True, **options)


def serve(e: ScriptedEngine, name: str, prompt: Sequence[int] = SYSTEM) -> int:
    request = e.add(name, prompt, max_tokens=3, ignore_eos=True)
    e.run()
    return request.num_cached


def fail(e: ScriptedEngine, name: str, prompt: Sequence[int] = SYSTEM, num_drawn: int = 0, n: int = 1) -> int:
    """Logits of a request, and of all that continue its prompt, are not finite after so many tokens."""
    request = e.add(name, prompt, max_tokens=60, ignore_eos=True, n=n)
    plain = e.scheduler.update

    def update(step_id: int, sampled: Mapping[str, int], complete: Collection[str] = ()) -> list[TokenEvent]:
        family = [one for one in (name, *request.child_ids) if one in sampled]
        bad = [one for one in family if len(e.requests[one].output_ids) == num_drawn]
        for one in bad:
            e.scheduler.distrust(one)
        for one in bad:
            e.abort(one)
        return plain(step_id, sampled, complete)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(e.scheduler, "update", update)
        e.run()
    assert len(request.output_ids) == num_drawn
    e.scheduler.check_integrity()
    return request.num_cached


def leave_bad_chunks(e: ScriptedEngine) -> None:
    """Two chunks of a prompt are published; their user goes before anything is drawn from them."""
    e.add("gone", SYSTEM, max_tokens=60)
    e.step()
    e.step()
    e.abort("gone")
    e.run()


@KINDS
@pytest.mark.parametrize("depth", [1, 2])
def test_what_nobody_has_drawn_from_goes_with_the_first_that_fails(kind: str, depth: int) -> None:
    e = engine(kind, depth)
    leave_bad_chunks(e)
    assert fail(e, "first") >= 16
    assert serve(e, "second") == 0
    e.check_outputs()
    e.check_drained()


def test_else_a_prompt_would_fail_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def void_what_it_computed(self: PrefixCache, request: Request) -> None:
        trail = self._trails[request.id]
        trail.is_trusted = False
        if own := [node for node in trail.nodes[trail.first_own :] if node.has_kv]:
            self.index.void(own[0])

    monkeypatch.setattr(PrefixCache, "distrust", void_what_it_computed)
    e = engine()
    leave_bad_chunks(e)
    assert [fail(e, name) for name in "abc"] == [32, 32, 32]


@KINDS
def test_bad_chunks_that_fell_to_the_host(kind: str) -> None:
    e = engine(kind, num_host_slabs=60)
    leave_bad_chunks(e)
    prefix = e.scheduler.cache.prefix
    while prefix.evict_block() or prefix.evict_checkpoint():
        pass
    e.step()
    assert fail(e, "first") >= 16
    assert serve(e, "second") == 0
    e.check_outputs()


@KINDS
@pytest.mark.parametrize("depth", [1, 2])
def test_what_others_have_drawn_from_stays(kind: str, depth: int) -> None:
    """Each that fails is followed by one that does not: nobody loses the system prompt to others' faults."""
    e = engine(kind, depth)
    for name in ("before 1", "before 2"):
        serve(e, name, [*SYSTEM, *map(ord, name)])
    for turn in range(4):
        assert fail(e, f"bad {turn}", [*SYSTEM, 30, 30, turn, 5, 6, 7], num_drawn=turn) == len(SYSTEM)
        assert serve(e, f"good {turn}", [*SYSTEM, 29, 29, turn, 5, 6, 7]) == len(SYSTEM)
    e.check_outputs()


@KINDS
def test_what_goes_bad_after_it_was_proven_fails_twice(kind: str) -> None:
    e = engine(kind)
    for name in ("before 1", "before 2"):
        serve(e, name, [*SYSTEM, *map(ord, name)])
    found = [fail(e, f"bad {turn}", [*SYSTEM, 30, 30, turn, 5, 6, 7]) for turn in range(3)]
    assert found == [len(SYSTEM), len(SYSTEM), 48 if kind == "state" else 0]  # that state may be good


def test_who_begins_with_it_and_draws_proves_it() -> None:
    e = engine(checkpoint_interval=32)
    leave_bad_chunks(e)  # which are good
    assert serve(e, "proves it", [*SYSTEM[:33], 30, 30, 30]) == 32
    assert fail(e, "bad") == 32
    assert serve(e, "next") == 32


def test_a_continuation_began_with_its_parents_prompt() -> None:
    """A system prompt that is good outlives a whole family of which nothing was ever finite."""
    e = engine(max_num_batched_tokens=200)
    for name in ("before 1", "before 2"):
        serve(e, name, [*SYSTEM, *map(ord, name)])
    assert fail(e, "bad", [*SYSTEM, 30, 30, 30, 30, 5, 6], n=3) == len(SYSTEM)
    assert serve(e, "next", [*SYSTEM, 29, 29, 29, 29, 5, 6]) == len(SYSTEM)


def test_a_continuation_that_forked_computed_only_what_came_after() -> None:
    e = engine(max_num_batched_tokens=200)
    prompt = [*SYSTEM, 30, 30, 30, 30, 5, 6]
    parent = e.add("parent", prompt, max_tokens=30, ignore_eos=True, n=2)
    child = parent.child_ids[0]
    while child not in e.requests or len(e.requests[child].output_ids) < 3:
        e.step()
    e.scheduler.distrust(child)
    e.abort(child)
    e.run()
    assert serve(e, "next", prompt) == 68
