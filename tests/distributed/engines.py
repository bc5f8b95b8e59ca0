"""Engine cores over several ranks, started as `LLM` starts them, with a look at their processes."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hybridserve.config.loader import load_config
from hybridserve.core.request import SamplingParams
from hybridserve.engine.core import EngineCore
from hybridserve.engine.executors import RanksExecutor
from hybridserve.engine.launchers import ProcessLauncher
from hybridserve.engine.messages import EngineRequest
from hybridserve.engine.planner import make_plan
from hybridserve.engine.rendezvous import Assignment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hybridserve.engine.messages import SequenceOutput

FAULTY_RANK = Path(__file__).parent / "faulty_rank.py"
FAULT = "HYBRIDSERVE_TEST_FAULT"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DEFAULTS = {"max_model_len": 256, "memory_bytes": "1MiB", "check_integrity": True, "dtype": "float32"}


class RestartingLauncher(ProcessLauncher):
    can_restart = True


@contextmanager
def engine(
    path: Path, fault: str | None = None, *, can_restart: bool = False, **options: Any
) -> Iterator[EngineCore]:
    """An engine core over processes of this machine; with a `fault`, of those of `faulty_rank`. They are
    started again after a failure if they `can_restart`, as under Ray."""
    config = load_config(str(path), None, {**DEFAULTS, **options})
    plan = make_plan(config, path)
    parallel = config.parallel
    executor = None
    assignment = Assignment(path, plan, parallel.step_timeout, parallel.interface)
    if can_restart:
        executor = RanksExecutor(assignment, RestartingLauncher())
    elif fault is not None:
        os.environ[FAULT] = fault
        try:
            executor = RanksExecutor(assignment, ProcessLauncher([str(FAULTY_RANK)]))
        finally:
            del os.environ[FAULT]
    core = EngineCore.create(config, plan, path, executor=executor)
    try:
        yield core
    finally:
        core.close()


def add(
    core: EngineCore, name: str, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: Any
) -> None:
    core.add(EngineRequest(request_id=name, prompt_ids=list(prompt), params=params, **more))


Outputs = dict[str, list["SequenceOutput"]]


def steps(core: EngineCore, count: int, outputs: Outputs | None = None) -> Outputs:
    """So many steps, or fewer if nothing is left; the outputs of each request, with those there were."""
    outputs = {} if outputs is None else outputs
    for _ in range(count):
        if core.has_work:
            for output in core.step():
                outputs.setdefault(output.request_id, []).append(output)
    return outputs


def finish(core: EngineCore, outputs: Outputs | None = None) -> Outputs:
    """Step until nothing is left."""
    outputs = {} if outputs is None else outputs
    while core.has_work:
        steps(core, 1, outputs)
    return outputs


def tokens(outputs: Sequence[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def rank_processes(parent: int | None = None) -> list[psutil.Process]:
    """The ranks that a process has started, in their order; of this process, unless told."""
    children = psutil.Process(parent).children(recursive=True)
    found = []
    for child in children:
        try:
            command = child.cmdline()
        except psutil.Error:
            continue
        for place, word in enumerate(command):
            if word == "hybridserve.engine.rank_process" or word == str(FAULTY_RANK):
                found.append((int(command[place + 1]), child))
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


def all_gone(processes: Sequence[psutil.Process], seconds: float = 5.0) -> bool:
    """Whether none of them runs any more, or will soon."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(is_alive(process) for process in processes):
            return True
        time.sleep(0.02)
    return False


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
