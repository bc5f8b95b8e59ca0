"""The pieces of code in docs/clients.md, as they stand there but for the port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness.serve_process import ROOT, Server, server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "clients.md").read_text()
ADDRESS = "127.0.0.1:8000"


def pieces(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with server() as one:
        yield one
        one.wait_idle()


def run(demo: Server, command: list[str], text: str | None = None, **environment: str) -> str:
    done = subprocess.run(
        [part.replace(ADDRESS, f"127.0.0.1:{demo.port}") for part in command],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(len(pieces("python"))))
def test_python(number: int, demo: Server) -> None:
    said = run(demo, [sys.executable, "-c", pieces("python")[number]])
    assert said.strip()
    if "BadRequestError" in pieces("python")[number]:
        assert "20 tokens" in said
        assert said.endswith("context_length_exceeded max_tokens\n")


def test_llm(demo: Server, tmp_path: Path) -> None:
    models = next(piece for piece in pieces("yaml") if "model_id" in piece)
    file = tmp_path / "extra-openai-models.yaml"
    file.write_text(models.replace(ADDRESS, f"127.0.0.1:{demo.port}"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = next(piece for piece in pieces("sh") if "llm -m" in piece)
    assert run(demo, ["sh", "-ec", command], "", LLM_USER_PATH=str(tmp_path), PATH=path).strip()
