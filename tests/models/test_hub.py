"""From a name to a directory, with no network: a folder, the bundled model, a cache made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridserve.models.hub import resolve_model

ROOT = Path(__file__).parents[2]
RESOLVE = """
import sys
from hybridserve.models.hub import resolve_model
try:
    print(resolve_model(sys.argv[1]))
except ValueError as error:
    print("ValueError:", error)
"""


def resolve_elsewhere(name: str, cache: Path, **environment: str) -> str:
    """In a process of its own: the hub's library reads its environment when it is imported."""
    env = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-c", RESOLVE, name]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def make_cache(cache: Path) -> Path:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "hub" / "models--somebody--tiny-jamba"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs" / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    return snapshot


def test_a_directory_never_touches_the_network(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert resolve_model(str(tmp_path)) == tmp_path


def test_demo_is_bundled() -> None:
    path = resolve_model("demo")
    assert (path / "config.json").is_file()
    assert (path / "model.safetensors").is_file()
    assert (path / "tokenizer.json").is_file()


def test_hub_id_in_the_cache(tmp_path: Path) -> None:
    snapshot = make_cache(tmp_path)
    assert resolve_elsewhere("somebody/tiny-jamba", tmp_path) == str(snapshot)


def test_hub_id_that_is_not_in_the_cache_offline(tmp_path: Path) -> None:
    answer = resolve_elsewhere("somebody/other", tmp_path)
    assert answer.startswith("ValueError: model: 'somebody/other': no such directory, and not to be had")
    assert len(answer.splitlines()) == 1


def test_without_the_library(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install 'hybridserve\[hub\]'"):
        resolve_model("somebody/tiny-jamba")


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/such/dir", "../a/b", "just-a-word", "a/b/c", "", "~nobody/x"]
)
def test_what_looks_like_a_path_is_not_asked_of_the_hub(name: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="no such directory, and not a hub id"):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("")
    with pytest.raises(ValueError, match=r"model\.gguf is a file; a directory"):
        resolve_model(str(file))
