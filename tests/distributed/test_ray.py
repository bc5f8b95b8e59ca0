"""Ranks on a real Ray cluster of one node: placed, lost and started again. In a process of its own, which
Ray changes in many ways."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.distributed.engines import GREEDY, add, engine, finish, tokens
from tests.harness.adapters import Kit

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [3, 4, 5, 6, 7]
SCRIPT = """
import logging, sys, time, psutil, ray
from hybridserve import LLM, SamplingParams
from hybridserve.distributed.failure import RankFailure
from hybridserve.engine import ray_launcher
from tests.distributed.engines import add, finish, steps, tokens

def actors():
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "_RankActor" in process.name() and process.status() != "zombie"]

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
options = {"max_model_len": 256, "memory_bytes": "1MiB", "dtype": "float32", "executor": "ray"}

def answer(adapter=None):
    print("answer", llm.generate([3, 4, 5, 6, 7], params, adapter=adapter)[0].outputs[0].token_ids)

def fail():
    (actor,) = actors()
    actor.kill()
    try:
        answer()
    except RankFailure as error:
        print("failed", error)

def fail_within():
    core = llm._core
    add(core, "lost", [3, 4, 5])
    print("began", len(tokens(steps(core, 3)["lost"])))
    (actor,) = actors()
    actor.kill()
    time.sleep(3)  # it is noticed between two steps
    try:
        print("went on", finish(core))
    except RankFailure as error:
        print("failed", error)
    print("ended", [str(output.finish_reason) for output in core.step()])

ray_launcher.PLACEMENT_SECONDS = 1
try:
    LLM(sys.argv[1], tensor=4, **options)
except RankFailure as error:
    print("no room", error)
ray_launcher.PLACEMENT_SECONDS = 60
with LLM(sys.argv[1], tensor=2, adapters={"A": sys.argv[2]}, **options) as llm:
    answer()
    answer("A")
    fail()
    answer("A")  # on a fresh rank, which has to be given the adapter again
    fail_within()
    answer()
    fail()
    (actor,) = actors() or [None]
    print("left", actor)
print("closed", actors())
"""


@pytest.mark.slow
def test_ray_places_ranks_and_starts_them_again(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    adapter = kit.adapter("A")
    with engine(kit.base, adapters={"A": str(adapter)}) as core:
        add(core, "base", PROMPT, GREEDY)
        add(core, "A", PROMPT, GREEDY, adapter="A")
        expected = {name: tokens(outputs) for name, outputs in finish(core).items()}
    assert expected["base"] != expected["A"]
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(kit.base), str(adapter)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    assert lines[0].startswith(
        "no room the ranks can't be started or watched: the cluster has no room for 4 ranks"
    )
    answers = [line for line in lines if line.startswith("answer")]
    assert answers == [f"answer {expected[name]}" for name in ("base", "A", "A", "base")]
    assert sum(line.startswith("failed rank 1 ") for line in lines) == 3
    assert "began 3" in lines
    assert "ended ['abort']" in lines
    assert lines[-2:] == ["left None", "closed []"]
