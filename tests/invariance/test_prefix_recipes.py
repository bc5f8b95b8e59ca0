"""Each recipe about prefixes as it is, and with its fault, which it must see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hybridserve.core.slabs import IntegrityError
from tests.invariance import prefix_recipes
from tests.prefix_mutations import FURTHER, PREFIX_MUTATIONS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.harness.engine import Oracle


@pytest.mark.parametrize("name", PREFIX_MUTATIONS)
def test_recipe(name: str, t_model: Path, oracle: Oracle) -> None:
    getattr(prefix_recipes, name)(t_model, oracle)


@pytest.mark.parametrize(("name", "mutate"), [*PREFIX_MUTATIONS.items(), *FURTHER])
def test_recipe_sees_its_fault(
    name: str,
    mutate: Callable[[pytest.MonkeyPatch], None],
    t_model: Path,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    # the harness checks the integrity of all bookkeeping after every step: that is a recipe's own check, too
    with pytest.raises((AssertionError, IntegrityError)):
        getattr(prefix_recipes, name)(t_model, oracle)


def test_every_recipe_has_a_mutation() -> None:
    named = {name for name in vars(prefix_recipes) if name[0] in "fb" and name[1:4].isdigit()}
    assert named <= PREFIX_MUTATIONS.keys()
