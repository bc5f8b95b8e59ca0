"""Adapters and what is kept of prefixes: nothing that one has computed is anybody else's. Each recipe is seen
red with a key that forgets what it is about."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.core import prefix_trails
from tests.harness.adapter_engine import AdapterEngine, Oracles
from tests.harness.adapters import activated_logits, edit_config
from tests.harness.engine import make_prompts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hybridserve.core.request import Request
    from tests.harness.adapters import Kit

BLOCK = 4


@pytest.fixture(scope="module")
def oracles(kit: Kit) -> Oracles:
    return Oracles(kit)


def cached(kit: Kit, names: list[str], roots: tuple[Path, ...] = ()) -> AdapterEngine:
    options = {"prefix_caching": True, "block_size": BLOCK, "checkpoint_interval": 8}
    return AdapterEngine(kit, names, roots=roots, **options)


def hit(engine: AdapterEngine, name: str, prompt: list[int], adapter: str | None) -> int:
    engine.ask(name, prompt, adapter)
    while engine.core.has_work:
        engine.step()
    return engine.results[name, 0].metrics.num_cached_tokens


def l016_tokens_alone_are_no_key(kit: Kit, oracles: Oracles, tmp_path: Path) -> None:
    prompt = make_prompts([40], vocab_size=128)[0]
    engine = cached(kit, ["A", "B"])
    hits = [hit(engine, f"r{index}", prompt, name) for index, name in enumerate([None, "A", "B", None, "A"])]
    assert hits == [0, 0, 0, 36, 36]
    engine.run()
    engine.check_all(oracles)


def l017_another_scale_is_another_adapter(kit: Kit, oracles: Oracles, tmp_path: Path) -> None:
    prompt = make_prompts([21], vocab_size=128)[0]
    shutil.copytree(kit.adapter("A"), tmp_path / "half")
    edit_config(tmp_path / "half", lora_alpha=1)
    engine = cached(kit, ["A"], (tmp_path,))
    assert hit(engine, "whole", prompt, "A") == 0
    engine.load("half", tmp_path / "half")
    assert hit(engine, "half", prompt, "half") == 0
    assert hit(engine, "whole again", prompt, "A") == 20
    one, other = (engine.results[name, 0].logits[0] for name in ("whole", "half"))
    assert (one - other).abs().mean() > 0.01
    engine.run()
    for name in ("whole", "whole again"):
        oracles["A"].check(engine.results[name, 0])


def l018_f082_other_content_under_a_name(kit: Kit, oracles: Oracles, tmp_path: Path) -> None:
    prompt = make_prompts([21], vocab_size=128)[0]
    path = tmp_path / "n"
    shutil.copytree(kit.adapter("A"), path)
    engine = cached(kit, [], (tmp_path,))
    engine.load("n", path)
    assert hit(engine, "before", prompt, "n") == 0
    engine.load("n", path)
    assert hit(engine, "equal", prompt, "n") == 20
    engine.unload("n")
    shutil.rmtree(path)
    shutil.copytree(kit.adapter("B"), path)
    engine.load("n", path)
    assert hit(engine, "after", prompt, "n") == 0
    engine.run()
    engine.check_all(oracles, before="A", equal="A", after="B")


def l019_two_names_of_one_content(kit: Kit, oracles: Oracles, tmp_path: Path) -> None:
    """Names mean nothing: equal content is shared, other content isn't."""
    prompt = make_prompts([21], vocab_size=128)[0]
    for name, content in (("x", "A"), ("y", "A"), ("z", "B")):
        shutil.copytree(kit.adapter(content), tmp_path / name)
    engine = cached(kit, [], (tmp_path,))
    for name in "xyz":
        engine.load(name, tmp_path / name)
    assert [hit(engine, name, prompt, name) for name in "xyz"] == [0, 20, 0]
    engine.run()
    engine.check_all(oracles, x="A", y="A", z="B")


def l022_shared_beginnings_around_blocks(kit: Kit, oracles: Oracles, tmp_path: Path) -> None:
    prompt = make_prompts([20], vocab_size=128)[0]
    engine = cached(kit, ["A"])
    index = 0
    for length in (7, 8, 9, 15, 16, 17):
        for adapter in ("A", None):
            own = make_prompts([4], seed=100 + index, vocab_size=128)[0]
            hit(engine, f"r{index}", prompt[:length] + own, adapter)
            index += 1
    assert engine.core.gauges()["prefix_num_hit_tokens"] > 60
    engine.run()
    engine.check_all(oracles)


def l023_an_adapter_that_begins_later(kit: Kit, oracles: Oracles, tmp_path: Path) -> None:
    """Up to its invocation the base has computed it, wherever in a block the invocation lies."""
    for length in (12, 13, 14, 15):
        before, after = make_prompts([length, 6], seed=4, vocab_size=128)
        before = [token if token not in (7, 8, 9) else 10 for token in before]
        cases = {
            "once": [*before, 7, 8, 9, *after],
            "twice": [*before, 7, 8, 9, *before[:5], 7, 8, 9, *after],
            "never": [*before, 7, 8, *before[:4]],
        }
        for name, prompt in cases.items():
            engine = cached(kit, ["alora"])
            for more in (3, 4):  # the second leaves a state where they part
                hit(engine, f"base {more}", [*before, more, more, more, more], None)
            start = length + (0 if name == "once" else 3 + 5)
            found = hit(engine, "r", prompt, "alora")
            assert found == length // BLOCK * BLOCK if name != "twice" else found >= 12
            assert found <= start
            assert hit(engine, "again", prompt, "alora") >= found
            hit(engine, "base again", prompt, None)
            engine.run()
            for one in ("r", "again"):
                result = engine.results[one, 0]
                ids = [*result.prompt_ids, *result.token_ids[:-1]]
                expected = activated_logits(kit.base, kit.adapter("alora"), ids)[len(prompt) - 1 :]
                assert (torch.stack(result.logits) - expected).abs().max() < 1e-4, (one, name)
            oracles[None].check(engine.results["base again", 0])


def tokens_alone(patch: pytest.MonkeyPatch) -> None:
    plain = prefix_trails.block_key

    def key(request: Request, place: int, size: int) -> bytes:
        adapter_id, request.adapter_id = request.adapter_id, None
        found = plain(request, place, size)
        request.adapter_id = adapter_id
        return found

    patch.setattr(prefix_trails, "block_key", key)


def names_for_contents(patch: pytest.MonkeyPatch) -> None:
    plain = prefix_trails.block_key

    def key(request: Request, place: int, size: int) -> bytes:
        adapter_id = request.adapter_id
        request.adapter_id = None if adapter_id is None else request.adapter
        found = plain(request, place, size)
        request.adapter_id = adapter_id
        return found

    patch.setattr(prefix_trails, "block_key", key)


def on_from_the_beginning(patch: pytest.MonkeyPatch) -> None:
    """Where an adapter begins is no part of the key: all is its own."""
    plain = prefix_trails.block_key

    def key(request: Request, place: int, size: int) -> bytes:
        start, request.adapter_start = request.adapter_start, 0
        found = plain(request, place, size)
        request.adapter_start = start
        return found

    patch.setattr(prefix_trails, "block_key", key)


RECIPES: dict[Callable[[Kit, Oracles, Path], None], Callable[[pytest.MonkeyPatch], None]] = {
    l016_tokens_alone_are_no_key: tokens_alone,
    l017_another_scale_is_another_adapter: tokens_alone,
    l018_f082_other_content_under_a_name: names_for_contents,
    l019_two_names_of_one_content: names_for_contents,
    l022_shared_beginnings_around_blocks: tokens_alone,
    l023_an_adapter_that_begins_later: on_from_the_beginning,
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_recipe(
    recipe: Callable[[Kit, Oracles, Path], None], kit: Kit, oracles: Oracles, tmp_path: Path
) -> None:
    recipe(kit, oracles, tmp_path)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_recipe_sees_its_fault(
    recipe: Callable[[Kit, Oracles, Path], None],
    kit: Kit,
    oracles: Oracles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    RECIPES[recipe](monkeypatch)
    with pytest.raises(AssertionError):
        recipe(kit, oracles, tmp_path)
