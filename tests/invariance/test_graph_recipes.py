"""Recorded decode steps: their own recipes, each with its faults, and all other recipes over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hybridserve.core.slabs import IntegrityError
from tests.graph_mutations import ADAPTER_MUTATIONS, GRAPH_MUTATIONS
from tests.harness.adapter_engine import Oracles
from tests.harness.adapters import Kit
from tests.harness.recorder import GraphGuarded, bounded  # noqa: F401 - a fixture
from tests.invariance import graph_recipes, recipes
from tests.invariance.test_recipes import RECIPES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.harness.engine import Oracle

pytestmark = pytest.mark.usefixtures("bounded")


@pytest.mark.parametrize("name", GRAPH_MUTATIONS)
def test_graph_recipe(name: str, t_model: Path, oracle: Oracle) -> None:
    getattr(graph_recipes, name)(t_model, oracle)


@pytest.mark.parametrize(
    ("name", "mutate"),
    [(name, mutate) for name, mutations in GRAPH_MUTATIONS.items() for mutate in mutations],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_graph_recipe_sees_its_fault(
    name: str,
    mutate: Callable[[pytest.MonkeyPatch], None],
    t_model: Path,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError)):
        getattr(graph_recipes, name)(t_model, oracle)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def oracles(kit: Kit) -> Oracles:
    return Oracles(kit)


def test_l014_adapters_come_and_go(kit: Kit, oracles: Oracles) -> None:
    graph_recipes.l014_adapters_come_and_go(kit, oracles)


@pytest.mark.parametrize("mutate", ADAPTER_MUTATIONS, ids=lambda each: each.__name__)
def test_l014_sees_its_fault(
    mutate: Callable[[pytest.MonkeyPatch], None],
    kit: Kit,
    oracles: Oracles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        graph_recipes.l014_adapters_come_and_go(kit, oracles)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [*RECIPES.values(), recipes.fork_n], ids=lambda recipe: recipe.__name__)
def test_every_recipe_over_recorded_steps(
    recipe: Callable[[Path, Oracle], None], t_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[GraphGuarded] = []

    def made(*arguments: object, **options: object) -> GraphGuarded:
        engines.append(GraphGuarded(*arguments, **options))  # type: ignore[arg-type]
        return engines[-1]

    monkeypatch.setattr(recipes, "Guarded", made)
    recipe(t_model, oracle)
