"""A tiny Jamba and its adapters, made once a run."""

from __future__ import annotations

import pytest

from tests.harness.adapters import Kit


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(tmp_path_factory.mktemp("adapters"))
