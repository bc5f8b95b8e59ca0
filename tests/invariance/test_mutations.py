"""A recipe that was never seen red proves nothing: with its fault injected, each one must fail by its own
checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hybridserve.core.slabs import IntegrityError
from tests.invariance import recipes
from tests.invariance.test_recipes import RECIPES
from tests.mutations import MUTATIONS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.engine import Oracle


@pytest.mark.parametrize("name", MUTATIONS)
def test_recipe_sees_its_fault(
    name: str, t_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTATIONS[name](monkeypatch)
    # the harness checks the integrity of all bookkeeping after every step: that is a recipe's own check, too
    with pytest.raises((AssertionError, IntegrityError)):
        getattr(recipes, name)(t_model, oracle)


def test_every_recipe_has_a_mutation() -> None:
    assert RECIPES.keys() <= MUTATIONS.keys()
