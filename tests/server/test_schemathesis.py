"""schemathesis makes requests of /openapi.json and sends them to the real server: none may be answered with
5xx, and each answer has to be one that the document describes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.harness.serve_process import ROOT, server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.serve_process import Server

pytestmark = pytest.mark.slow

ADAPTERS = ROOT / "hybridserve" / "models" / "demo" / "adapters"
NUM_EXAMPLES = 40
"""Of fuzzing, for each path."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A context so short that no answer takes long."""
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    adapters = f"adapters: {{bard: {ADAPTERS / 'shakespeare'}}}"
    path.write_text(
        "model: demo\nmax_model_len: 64\n"
        f"lora: {{allow_runtime_loading: true, roots: [{ADAPTERS}], {adapters}}}\n"
    )
    with server(file=path) as one:
        yield one
        one.wait_idle()


def test_every_answer_is_as_the_document_says(served: Server, tmp_path: Path) -> None:
    """All checks but one: not everything that fits the schema can be served. A prompt may be too long."""
    url = f"http://127.0.0.1:{served.port}/openapi.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", url, "--no-color", "--seed", "1"]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(NUM_EXAMPLES)]
    command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
    command += ["--request-timeout", "60", "--continue-on-failure", "--generation-database", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert served.process.poll() is None
    assert not [line for line in served.log if "ERROR" in line]
