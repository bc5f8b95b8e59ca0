"""Programs that some tests need and a machine may not have: without them those tests are skipped, or fail."""

from __future__ import annotations

import os

import pytest

VARIABLE = "HYBRIDSERVE_REQUIRE_TOOLS"


def need(is_there: bool, problem: str) -> None:
    """Skip the test where `is_there` is false; or fail it, with HYBRIDSERVE_REQUIRE_TOOLS=1."""
    if is_there:
        return
    if os.environ.get(VARIABLE) == "1":
        pytest.fail(f"{problem}, and {VARIABLE} is 1", pytrace=False)
    pytest.skip(problem)
