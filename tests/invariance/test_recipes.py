"""Each recipe as it is. `test_mutations` shows that each one can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.invariance import recipes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.harness.engine import Oracle

RECIPES = {name: recipe for name, recipe in vars(recipes).items() if name[0] == "f" and name[1:4].isdigit()}


@pytest.mark.parametrize("recipe", [*RECIPES.values(), recipes.fork_n], ids=lambda recipe: recipe.__name__)
def test_recipe(recipe: Callable[[Path, Oracle], None], t_model: Path, oracle: Oracle) -> None:
    recipe(t_model, oracle)
