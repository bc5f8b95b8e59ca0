"""Ranks that die, hang, disagree or can't load: one clear error, soon, and nothing is left running."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from safetensors.torch import load_file, save_file

from hybridserve import cli
from hybridserve.core.request import FinishReason
from hybridserve.distributed.failure import RankFailure
from hybridserve.engine.launchers import _how
from tests.distributed.engines import (
    add,
    all_gone,
    engine,
    finish,
    is_alive,
    rank_processes,
    tokens,
)
from tests.harness.engine import make_prompts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPTS = make_prompts([5, 9, 14])


def run_until_failure(core) -> tuple[RankFailure, float]:
    """What is raised, and how long after the call."""
    for index, prompt in enumerate(PROMPTS):
        add(core, f"r{index}", prompt)
    while core.has_work:
        begin = time.monotonic()
        try:
            core.step()
        except RankFailure as error:
            return error, time.monotonic() - begin
    pytest.fail("no rank failed")


def check_everything_failed(core, error: RankFailure) -> None:
    """Each request once, with the reason; and what comes later fails at once, for the same reason."""
    outputs = core.step()
    assert sorted(output.request_id for output in outputs) == ["r0", "r1", "r2"]
    for output in outputs:
        assert output.finish_reason == FinishReason.ABORT
        assert output.stop_reason == str(error)
    assert not core.has_work
    add(core, "later", PROMPTS[0])
    with pytest.raises(RankFailure, match="rank 1"):
        core.step()


def test_a_rank_that_is_killed(model: Callable[[str], Path]) -> None:
    with engine(model("jamba"), tensor=2) as core:
        (process,) = rank_processes()
        for index, prompt in enumerate(PROMPTS):
            add(core, f"r{index}", prompt)
        for _ in range(3):
            core.step()
        process.kill()
        begin = time.monotonic()
        with pytest.raises(
            RankFailure, match=rf"rank 1 \(process {process.pid}\) was ended by SIGKILL"
        ) as raised:
            finish(core)
        assert time.monotonic() - begin < 5
        check_everything_failed(core, raised.value)
    assert not rank_processes()


@pytest.mark.slow
def test_a_rank_that_dies_while_nothing_runs(model: Callable[[str], Path]) -> None:
    with engine(model("jamba"), tensor=2) as core:
        (process,) = rank_processes()
        process.terminate()
        assert all_gone([process])
        time.sleep(0.2)
        error, seconds = run_until_failure(core)
        assert "was ended by SIGTERM" in str(error)
        assert seconds < 5


def test_a_rank_that_stops_responding(model: Callable[[str], Path]) -> None:
    """Stopped by a signal, so that nothing in it can take notice: it is ended all the same."""
    with engine(model("jamba"), tensor=2, step_timeout=2) as core:
        (process,) = rank_processes()
        add(core, "warm", PROMPTS[0])
        finish(core)
        process.suspend()
        error, seconds = run_until_failure(core)
        assert f"rank 1 (process {process.pid}) did not answer within 2 s (parallel.step_timeout)" in str(
            error
        )
        assert 1.5 < seconds < 5
        assert all_gone([process])
        check_everything_failed(core, error)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", r"rank 1 \(process \d+\): ZeroDivisionError: a fault of this test"),
        pytest.param("exit", r"rank 1 \(process \d+\) ended with status 17", marks=pytest.mark.slow),
        ("skip", r"rank 1 \(process \d+\): expected message \d+ of rank 0, got message \d+"),
        pytest.param(
            "repeat",
            r"rank 1 \(process \d+\): was told to run step 1 after step \d+",
            marks=pytest.mark.slow,
        ),
        pytest.param("hang", "rank 1 .* did not answer within 3 s", marks=pytest.mark.slow),
    ],
)
def test_faults_of_a_rank(fault: str, reason: str, model: Callable[[str], Path]) -> None:
    with engine(model("jamba"), fault, tensor=2, step_timeout=3) as core:
        processes = rank_processes()
        error, seconds = run_until_failure(core)
        assert error.args[0]
        assert seconds < (6 if fault == "hang" else 2)
        with pytest.raises(RankFailure, match=reason):
            raise error
        if fault == "raise":
            assert "faulty_launch" in error.__notes__[0]
        assert all_gone(processes)
        check_everything_failed(core, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("load", "rank 1 .*: ValueError: there is no such model here"),
        ("version", "rank 1 .*: this rank runs hybridserve 0.0.1, torch 1.0, rank 0 hybridserve "),
    ],
)
def test_a_rank_that_cannot_begin(fault: str, reason: str, model: Callable[[str], Path]) -> None:
    with pytest.raises(RankFailure, match=reason), engine(model("jamba"), fault, tensor=2):
        pass
    assert not rank_processes()


def test_a_rank_that_hangs_while_it_loads(model: Callable[[str], Path]) -> None:
    begin = time.monotonic()
    with (
        pytest.raises(RankFailure, match=r"^rank 1 \(process \d+\) loaded nothing for 3 s \(parallel"),
        engine(model("jamba"), "load-hang", tensor=2, step_timeout=3),
    ):
        pass
    assert time.monotonic() - begin < 60
    assert not rank_processes()


def test_a_rank_may_load_slowly(model: Callable[[str], Path]) -> None:
    begin = time.monotonic()
    with engine(model("jamba"), "load-slow", tensor=2, step_timeout=3) as core:
        assert time.monotonic() - begin > 6
        add(core, "r", PROMPTS[0])
        assert finish(core)


def test_a_broken_checkpoint_is_found_before_any_rank_starts(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    """By rank 0, though the tensor is another stage's."""
    path = tmp_path / "broken"
    shutil.copytree(model("jamba"), path)
    tensors = load_file(path / "model.safetensors")
    name = max(name for name in tensors if name.startswith("model.layers."))
    del tensors[name]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    message = rf"the tensor '{re.escape(name)}' .* is missing"
    with pytest.raises(ValueError, match=message), engine(path, pipeline=2):
        pass


@pytest.mark.slow
def test_a_rank_that_rank_0_does_not_talk_to(model: Callable[[str], Path]) -> None:
    """Of the second stage's tensor group: rank 0 only waits for what comes of it."""
    with engine(model("jamba"), tensor=2, pipeline=2) as core:
        processes = rank_processes()
        add(core, "r0", PROMPTS[0])
        core.step()
        processes[2].kill()
        begin = time.monotonic()
        with pytest.raises(RankFailure, match=r"rank 3 \(process \d+\) was ended by SIGKILL"):
            finish(core)
        assert time.monotonic() - begin < 5
        assert all_gone(processes)


@pytest.mark.slow
def test_only_who_hangs_is_blamed(model: Callable[[str], Path]) -> None:
    """Ranks 1 and 2 wait for rank 3, and say so."""
    with engine(model("jamba"), tensor=2, pipeline=2, step_timeout=3) as core:
        processes = rank_processes()
        add(core, "r0", PROMPTS[0])
        core.step()
        processes[2].suspend()
        with pytest.raises(RankFailure, match=r"^rank 3 \(process \d+\) did not answer within 3 s"):
            finish(core)
        assert all_gone(processes)


def test_an_interrupt_leaves_the_ranks_in_step(model: Callable[[str], Path], monkeypatch) -> None:
    """Ctrl-C while a step runs: it is dropped, on no rank half done, and its sequences compute again."""
    with engine(model("jamba"), tensor=2) as core:
        add(core, "alone", PROMPTS[1])
        expected = tokens(finish(core)["alone"])
        collect = core.executor.collect
        num_calls = 0

        def interrupted():
            nonlocal num_calls
            num_calls += 1
            if num_calls in (2, 3, 6):
                raise KeyboardInterrupt
            return collect()

        monkeypatch.setattr(core.executor, "collect", interrupted)
        add(core, "r", PROMPTS[1])
        outputs = []
        while core.has_work:
            try:
                outputs += core.step()
            except KeyboardInterrupt:
                continue
        assert num_calls > 6
        assert tokens(outputs) == expected


SCRIPT = """
import sys
from hybridserve import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=256, memory_bytes="1MiB", tensor=2)
params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
llm.generate([3, 4, 5], SamplingParams(max_tokens=2))
print("started", flush=True)
while True:
    llm.generate([[3, 4, 5]] * 4, params)
"""


def start_script(path: Path, script: str = SCRIPT) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A program without a `__main__` guard, which by default generates for ever, and its ranks."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n", process.communicate()[1]
    ranks = rank_processes(process.pid)
    assert len(ranks) == 1
    return process, ranks


def errors_of(process: subprocess.Popen[str]) -> str:
    """What it has written when it has ended; it is given time, and nothing is left of it in any case."""
    try:
        return process.communicate(timeout=60)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"it goes on, having written {process.communicate()[1]!r}")


def check_all_end_with(process: subprocess.Popen[str], ranks: list[psutil.Process]) -> None:
    process.kill()
    process.wait()
    ended = all_gone(ranks, 3)
    for rank in ranks:
        if not ended:
            rank.kill()
    process.communicate()
    assert ended


@pytest.mark.slow
def test_no_rank_outlives_rank_0(model: Callable[[str], Path]) -> None:
    process, ranks = start_script(model("jamba"))
    check_all_end_with(process, ranks)


STUCK_SCRIPT = """
import sys
from pathlib import Path
from tests.distributed.engines import add, engine, finish
with engine(Path(sys.argv[1]), "stuck", tensor=2) as core:
    print("started", flush=True)
    add(core, "r", [3, 4, 5])
    finish(core)
"""


def test_not_even_one_that_is_stuck_outlives_rank_0(model: Callable[[str], Path]) -> None:
    """In C code that lets no other thread of it run: the system has to end it."""
    process, ranks = start_script(model("jamba"), script=STUCK_SCRIPT)
    time.sleep(2)
    assert is_alive(ranks[0])
    check_all_end_with(process, ranks)


def test_ctrl_c(model: Callable[[str], Path]) -> None:
    """To the whole foreground process group, as a terminal sends it: one traceback, that of the program."""
    process, ranks = start_script(model("jamba"))
    os.killpg(process.pid, signal.SIGINT)
    errors = errors_of(process)
    assert process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert all_gone(ranks)


@pytest.mark.slow
def test_a_program_whose_rank_dies_exits_with_an_error(model: Callable[[str], Path]) -> None:
    process, ranks = start_script(model("jamba"))
    others = [child for child in psutil.Process(process.pid).children(recursive=True) if child not in ranks]
    ranks[0].kill()
    errors = errors_of(process)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("hybridserve.distributed.failure.RankFailure: rank 1 (process ")
    assert "terminate called" not in errors
    assert all_gone(others)


def test_the_command_line_says_it_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def fail(args) -> None:
        raise RankFailure("rank 3 was ended by SIGKILL")

    monkeypatch.setitem(cli.COMMANDS, "plan", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "demo"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "hybridserve: rank 3 was ended by SIGKILL\n"


def test_how_a_process_ended() -> None:
    assert _how(17) == "ended with status 17"
    assert _how(-signal.SIGTERM) == "was ended by SIGTERM"
    assert _how(-40) == "was ended by signal 40"  # a real-time one has no name


def test_who_is_alive_is_known() -> None:
    """The check that the others rely on."""
    child = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert is_alive(child)
    assert not all_gone([child], 0.2)
    child.kill()
    assert all_gone([child])
    child.wait()
