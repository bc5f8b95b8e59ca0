"""Two minutes of a server's hard life: benchmarks/soak.py, which has nothing to find fault with."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.harness.serve_process import ROOT

pytestmark = pytest.mark.slow


def test_after_two_minutes_nothing_is_left() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/soak.py", "--minutes", "2", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["faults"]
    statuses = found["requests"]
    assert min(statuses[name] for name in ("200", "400", "404", "adapters 200")) > 10, "it did not do much"
    assert found["hung_up"] > 10
    assert found["compared"] > 10
