"""The T-model of the recipes, its siblings, and their oracles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.harness.engine import Oracle
from tests.harness.models import save_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def t_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t-model")
    save_model("jamba", path, seed=0)
    return path


@pytest.fixture(scope="session")
def oracle(t_model: Path) -> Oracle:
    return Oracle(t_model)
