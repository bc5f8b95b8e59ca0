"""Clients in JavaScript against the real server: OpenAI's, and the AI SDK. What they check is in node/."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness.required import need
from tests.harness.serve_process import ROOT

if TYPE_CHECKING:
    from tests.harness.serve_process import Server

HERE = Path(__file__).parent / "node"
SCRIPTS = ("openai.mjs", "ai_sdk.mjs")
INSTALL = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session", autouse=True)
def _node() -> None:
    """Before a server is started."""
    need(shutil.which("node") is not None and shutil.which("npm") is not None, "node or npm is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the scripts and the packages that they need, of the versions in package-lock.json."""
    path = tmp_path_factory.mktemp("node")
    for name in (*SCRIPTS, "package.json", "package-lock.json"):
        shutil.copy(HERE / name, path)
    done = subprocess.run(INSTALL, cwd=path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def test_what_the_documentation_says(folder: Path, base_url: str, served: Server) -> None:
    page = (ROOT / "docs" / "clients.md").read_text()
    pieces = re.findall(r"^```js\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(pieces) == len(SCRIPTS)
    for number, piece in enumerate(pieces):
        (folder / f"documented{number}.mjs").write_text(
            piece.replace("http://127.0.0.1:8000/v1", base_url).replace('"scripture"', '"kjv"')
        )
        command = ["node", f"documented{number}.mjs"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_sees_what_it_expects(script: str, folder: Path, base_url: str, served: Server) -> None:
    done = subprocess.run(
        ["node", script, base_url],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "AI_SDK_LOG_WARNINGS": "false"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all is well\n"
    served.wait_idle()
