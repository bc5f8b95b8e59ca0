"""The command `llm` against the real server, configured as docs/server.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.serve_process import Server

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path: Path, base_url: str) -> Path:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: tiny\n  model_name: demo\n  api_base: {base_url}\n"
        f"- model_id: bard\n  model_name: bard\n  api_base: {base_url}\n"
        f"- model_id: continue\n  model_name: demo\n  api_base: {base_url}\n  completion: true\n"
    )
    return tmp_path


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"},
    )


def said(home: Path, *arguments: str) -> str:
    options = ("-o", "temperature", "0", "-o", "max_tokens", "12")
    done = run(home, *arguments, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_knows_the_models(home: Path) -> None:
    listed = run(home, "models", "list")
    assert "tiny" in listed.stdout
    assert "bard" in listed.stdout


def test_a_prompt_streamed_and_whole(home: Path, served: Server) -> None:
    streamed = said(home, "-m", "tiny", "what is the time?")
    assert streamed
    assert said(home, "-m", "tiny", "--no-stream", "what is the time?") == streamed
    assert said(home, "-m", "bard", "what is the time?") != streamed
    messages = [{"role": "user", "content": "what is the time?"}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 12}
    _, answer = served.post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"].strip() == streamed
    assert said(home, "-m", "continue", "for the")


def test_what_was_used_is_in_its_log(home: Path) -> None:
    said(home, "-m", "tiny", "for the")
    done = run(home, "logs", "--json", "-n", "1")
    (entry,) = json.loads(done.stdout)
    assert entry["output_tokens"] == 12


def test_a_mistake_is_a_message(home: Path) -> None:
    done = run(home, "-m", "tiny", "a", "-o", "max_tokens", "5000")
    assert done.returncode == 1
    assert "max_model_len is 2048" in done.stderr
    assert "Traceback" not in done.stderr
