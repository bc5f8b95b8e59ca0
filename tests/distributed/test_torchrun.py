"""Ranks that torchrun has started: one program on all of them, of which rank 0 alone comes out of `LLM`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hybridserve.config.loader import load_config
from hybridserve.engine.executors import create_executor
from hybridserve.engine.launchers import TorchrunLauncher
from hybridserve.engine.planner import make_plan
from tests.distributed.engines import GREEDY, add, engine, finish, tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPT = [3, 4, 5, 6, 7]
SCRIPT = """
import sys
from hybridserve import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
print("reached", flush=True)
llm = LLM(sys.argv[1], max_model_len=256, memory_bytes="1MiB", dtype="float32", tensor=int(sys.argv[2]))
print("answer", llm.generate([3, 4, 5, 6, 7], params)[0].outputs[0].token_ids, flush=True)
{more}
"""


def run(path: Path, folder: Path, tensor: int, more: str = "") -> subprocess.CompletedProcess[str]:
    """The script on two ranks."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(more=more))
    options = ["--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(path), str(tensor)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_rank_0_runs_the_program_and_the_others_serve(model: Callable[[str], Path], tmp_path: Path) -> None:
    with engine(model("jamba")) as core:
        add(core, "r", PROMPT, GREEDY)
        expected = tokens(finish(core)["r"])
    ended = run(model("jamba"), tmp_path, tensor=2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("reached") == 2
    assert [line for line in ended.stdout.splitlines() if "answer" in line] == [f"answer {expected}"]


@pytest.mark.slow
def test_another_number_of_ranks_is_refused(model: Callable[[str], Path], tmp_path: Path) -> None:
    ended = run(model("jamba"), tmp_path, tensor=1)
    assert ended.returncode != 0
    assert "parallel.tensor: 1 x parallel.pipeline 1 are 1 ranks, but torchrun started 2" in ended.stderr


@pytest.mark.slow
def test_a_rank_that_dies(model: Callable[[str], Path], tmp_path: Path) -> None:
    """From rank 0, which finds the other one's process in its neighbourhood."""
    more = """
import os, psutil
(other,) = [p for p in psutil.Process(os.getppid()).children() if p.pid != os.getpid()]
other.kill()
llm.generate([3, 4, 5], params)
print("answer though nobody is there")
"""
    ended = run(model("jamba"), tmp_path, tensor=2, more=more)
    assert ended.returncode != 0
    assert "though nobody" not in ended.stdout
    assert "SIGKILL" in ended.stderr  # torchrun's own report names the rank and how it ended


def test_what_torchrun_must_have_said(monkeypatch: pytest.MonkeyPatch, model: Callable[[str], Path]) -> None:
    environment = dict.fromkeys(TorchrunLauncher.VARIABLES, "1") | {"WORLD_SIZE": "4"}
    assert TorchrunLauncher.is_present(environment)
    assert not TorchrunLauncher.is_present({**environment, "WORLD_SIZE": "1"})
    assert not TorchrunLauncher.is_present({name: environment[name] for name in ("RANK", "WORLD_SIZE")})
    assert TorchrunLauncher(environment, 2, 2).rank == 1
    with pytest.raises(ValueError, match=r"2 x parallel\.pipeline 1 are 2 ranks, but torchrun started 4"):
        TorchrunLauncher(environment, 2, 1)
    for name in TorchrunLauncher.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    config = load_config(str(model("jamba")), None, {"executor": "torchrun", "memory_bytes": "1MiB"})
    with pytest.raises(
        ValueError, match="torchrun: it did not start this program, or it would have set RANK"
    ):
        create_executor(config.parallel, make_plan(config, model("jamba")), model("jamba"))
