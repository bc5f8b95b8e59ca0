"""What a user sees of each kind of failure: one block, root cause last, a traceback only with --verbose."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybridserve.cli import main
from hybridserve.commands.failure import CommandFailed, report
from hybridserve.distributed.failure import RankFailure
from hybridserve.frontend.errors import EngineDead

ROOT = Path(__file__).parents[2]
GENERATE = ["generate", "demo", "--prompt", "x", "--max-tokens", "2"]


def run(*arguments: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which may have so many bytes of addresses."""
    command = [sys.executable, "-m", "hybridserve", *arguments]
    if limit is not None:  # by a shell: to run code before exec, all that this process has mapped is forked
        command = ["sh", "-c", f'ulimit -v {limit // 1024} && exec "$@"', "sh", *command]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def raised(make) -> Exception:
    try:
        make()
    except Exception as error:
        return error
    raise AssertionError


def chain() -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise KeyError("kernel") from error
    except KeyError as error:
        raise RuntimeError("the step failed") from error


def reported(capsys, error: Exception, *, verbose: bool = False) -> tuple[int, str]:
    status = report("generate", error, verbose=verbose)
    return status, capsys.readouterr().err


def test_the_root_cause_is_last(capsys):
    status, said = reported(capsys, raised(chain))
    assert status == 1
    assert said.splitlines() == [
        "hybridserve: generate failed; --verbose shows where",
        "    RuntimeError: the step failed",
        "    caused by KeyError: 'kernel'",
        "    caused by OSError: [Errno 28] No space left on device",
    ]
    status, said = reported(capsys, raised(chain), verbose=True)
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith("    caused by OSError: [Errno 28] No space left on device\n")


def test_a_cause_that_was_dealt_with_is_none(capsys):
    def fail() -> None:
        try:
            chain()
        except RuntimeError:
            raise LookupError("nothing is left") from None

    assert reported(capsys, raised(fail))[1].splitlines()[1:] == ["    LookupError: nothing is left"]


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("seed: -1: is negative"), 2, "seed: -1: is negative"),
        (
            FileNotFoundError(2, "No such file or directory", "p.jsonl"),
            2,
            "p.jsonl: No such file or directory",
        ),
        (RankFailure("rank 1 of 2 died; its last error: ..."), 1, "rank 1 of 2 died; its last error: ..."),
        (EngineDead("the engine failed: X", "Traceback of theirs\n"), 1, "the engine failed: X"),
        (CommandFailed("2 of 3 results ended early"), 1, "2 of 3 results ended early"),
    ],
)
def test_what_says_all_by_itself_is_one_line(capsys, error, status, line):
    assert reported(capsys, error) == (status, f"hybridserve: {line}\n")
    _, verbose = reported(capsys, error, verbose=True)
    assert verbose.endswith(f"hybridserve: {line}\n")
    assert ("Traceback of theirs" in verbose) == isinstance(error, EngineDead)
    assert ("Traceback (most" in verbose or type(error).__name__ in verbose) != isinstance(
        error, CommandFailed
    )


def test_every_problem_of_a_file_is_a_line(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("model: demo\nseed: x\ndtype: y\n")
    with pytest.raises(SystemExit) as status:
        main(["plan", str(path)])
    assert status.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"hybridserve: {path}:2: seed: 'x': ")
    assert second.startswith(f"hybridserve: {path}:3: dtype: 'y': ")


@pytest.mark.parametrize(
    "command",
    ["bench", "chat", "generate", "inspect", "plan", "serve", "quantize", "config check", "config show"],
)
def test_every_command_has_verbose(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert "--verbose" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["plan"], ["inspect"], ["generate", "--prompt", "x"]])
def test_a_bad_model_directory(tmp_path, arguments, capsys):
    for verbose in ([], ["--verbose"]):
        with pytest.raises(SystemExit) as status:
            main([arguments[0], str(tmp_path), *arguments[1:], *verbose])
        assert status.value.code == 2
        said = capsys.readouterr().err
        assert said.splitlines()[-1].startswith(f"hybridserve: {tmp_path}: no config.json there")
        assert ("Traceback" in said) == bool(verbose)


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", "demo", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    *log, said = done.stderr.splitlines()
    assert re.fullmatch(r"hybridserve: server.host, server.port: 127.0.0.1:\d+: Address already in use", said)
    assert all(" INFO " in line for line in log)


@pytest.mark.parametrize("verbose", [[], ["--verbose"]])
def test_in_a_log_of_json_it_is_json_too(tmp_path, verbose):
    path = tmp_path / "c.yaml"
    path.write_text("model: demo\nseed: x\ndtype: y\n")
    done = run("serve", str(path), "--log-format", "json", *verbose)
    assert done.returncode == 2
    (record,) = map(json.loads, done.stderr.splitlines())
    assert record["level"] == "error"
    assert [line[: len(f"{path}:2: ")] for line in record["message"].splitlines()] == [
        f"{path}:2: ",
        f"{path}:3: ",
    ]
    assert ("traceback" in record) == bool(verbose)


@pytest.mark.parametrize("command", [GENERATE, ["plan", "demo"]], ids=lambda command: command[0])
def test_an_arena_that_is_larger_than_the_machine_says_what_would_fit(command, capsys):
    with pytest.raises(SystemExit) as status:
        main([*command, "--cache.memory_bytes", "100TiB"])
    assert status.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(
        r"is more than the .* that this machine has; what would fit: cache.memory_bytes: \S+$", line
    )


@pytest.mark.slow
def test_serve_says_what_would_fit():
    done = run("serve", "demo", "--port", "0", "--cache.memory_bytes", "100TiB")
    assert done.returncode == 2
    assert re.search(r"; what would fit: cache.memory_bytes: \S+$", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_memory_that_a_limit_does_not_give_says_what_would_fit_and_that_does():
    """The machine has more: only trying tells."""
    limit = 6 * 2**30
    done = run(*GENERATE, "--cache.memory_bytes", "6GiB", limit=limit)
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("hybridserve: cache.memory_bytes: an arena of 6.0 GiB can't be allocated")
    (key, size) = re.search(r"; what would fit: ([\w.]+): (\S+)$", line).groups()
    done = run(*GENERATE, f"--{key}", size, limit=limit)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_rank_that_fails_while_it_starts(tmp_path):
    done = run(*GENERATE, "--parallel.tensor", "2", "--parallel.interface", "203.0.113.9")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "hybridserve: parallel.interface: 203.0.113.9 is no address"
    )


@pytest.mark.slow
def test_the_engine_s_process_says_what_is_wrong_with_a_checkpoint(tmp_path):
    """It is its child that finds out; the parent tells, once."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "hybridserve" / "models" / "demo", model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    for command in (["serve", str(model), "--port", "0"], ["bench", str(model)]):
        done = run(*command)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("hybridserve: ")
        assert "model.safetensors" in last
