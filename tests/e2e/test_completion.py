"""Completion of command lines in real shells, and what `--help` and it bring in: they have to be quick."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.command_line import imported_by
from tests.harness.required import need

ROOT = Path(__file__).parents[2]
HEAVY = {
    "torch",
    "numpy",
    "transformers",
    "fastapi",
    "pydantic",
    "prometheus_client",
    "ruamel.yaml",
    "uvicorn",
}
COMMANDS = (
    "bench",
    "chat",
    "completion",
    "config",
    "config check",
    "config show",
    "serve",
    "generate",
    "inspect",
    "plan",
    "quantize",
)

BASH = """
eval "$(hybridserve completion bash)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
read -ra COMP_WORDS <<< "$1"
[[ $1 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
function=$(complete -p hybridserve | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function hybridserve "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = """
hybridserve completion fish | source
complete --do-complete $argv[1] | string split --fields 1 \\t; true
"""
ZSH = """
compdef() { print -r -- "$2 by $1" }
eval "$(hybridserve completion zsh)"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where somebody types: the command is on the path, and there are some files."""
    for name in ("a.yaml", "b.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "models").mkdir()
    command = tmp_path / "bin" / "hybridserve"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hybridserve "$@"\n')
    command.chmod(0o755)
    return tmp_path


def shell(name: str, script: str, folder: Path, *arguments: str) -> list[str]:
    """What it prints, line by line."""
    path = shutil.which(name)
    need(path is not None, f"there is no {name} here")
    clean = {"bash": ["--norc", "--noprofile"], "fish": ["--no-config"], "zsh": ["-f"]}[name]
    dashes = [] if name == "fish" else [name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    done = subprocess.run(
        [path, *clean, "-c", script, *dashes, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return [line.rstrip() for line in done.stdout.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("hybridserve se", ["serve"]),
        ("hybridserve config ", ["check", "show"]),
        ("hybridserve completion ", ["bash", "zsh", "fish"]),
        ("hybridserve serve demo --max_num", ["--max_num_seqs", "--max_num_batched_tokens"]),
        ("hybridserve serve demo --max-num", ["--max-num-seqs", "--max-num-batched-tokens"]),
        ("hybridserve serve demo --scheduler.po", ["--scheduler.policy"]),
        ("hybridserve serve demo --cache.dtype ", ["auto", "float32", "bfloat16", "float16"]),
        ("hybridserve serve demo --policy=p", ["priority"]),
        ("hybridserve serve demo --lora.fair_share ", ["true", "false"]),
        ("hybridserve config check ", ["a.yaml", "b.jsonl", "models/", "bin/"]),
        ("hybridserve serve mo", ["models/"]),
        ("hybridserve serve de", ["demo"]),
        ("hybridserve generate demo --prompts b", ["b.jsonl", "bin/"]),
        ("hybridserve generate demo --max_tokens ", []),
        ("hybridserve generate demo --prompt x --ignore", ["--ignore_eos"]),
        ("hybridserve config show a.yaml --eff", ["--effective"]),
    ],
)
def test_bash(folder, line, offered):
    assert sorted(shell("bash", BASH, folder, line)) == sorted(offered)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("hybridserve se", ["serve"]),
        ("hybridserve serve demo --max-num", ["--max-num-seqs", "--max-num-batched-tokens"]),
        ("hybridserve serve demo --cache.dtype fl", ["float32", "float16"]),
        ("hybridserve config check a", ["a.yaml"]),
    ],
)
def test_fish(folder, line, offered):
    assert sorted(shell("fish", FISH, folder, line)) == sorted(offered)


def test_zsh_takes_the_script(folder):
    assert shell("zsh", ZSH, folder) == ["hybridserve by _python_argcomplete"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_brings_nothing_heavy(command):
    brought = imported_by(f"from hybridserve.cli import main; main({[*command.split(), '--help']})")
    assert "hybridserve.cli_options" in brought
    assert not HEAVY & brought


def test_an_answer_to_a_shell_brings_nothing_heavy(folder):
    """Somebody waits for it with a finger on the key."""
    tracer = (
        "import sys, os\n_exit = os._exit\ndef ended(status):\n    print(*sys.modules, file=sys.stderr)\n"
    )
    tracer += "    sys.stderr.flush()\n    _exit(status)\nos._exit = ended\n"
    tracer += "from hybridserve.cli import main\nmain([])"
    line = "hybridserve serve demo --cache.dtype "
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    out = folder / "answer"
    done = subprocess.run(
        [sys.executable, "-c", tracer],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(out)},
    )
    assert done.returncode == 0, done.stderr
    assert out.read_text().split("\v") == ["auto", "float32", "bfloat16", "float16"]
    brought = set(done.stderr.split())
    assert "argcomplete" in brought
    assert not HEAVY & brought
