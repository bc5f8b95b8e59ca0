"""Fewer threads beside busy neighbours: what is decided from readings, what is read, and who sets the number;
at last a real engine beside real neighbours."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridserve import LLM, SamplingParams
from hybridserve.engine import thread_governor
from hybridserve.engine.thread_governor import (
    BURST,
    LONGEST,
    PERIOD,
    SHORTEST,
    Decision,
    Reading,
    ThreadGovernor,
    WaitCounters,
    govern_threads,
)
from hybridserve.engine.threads import VARIABLE
from tests.harness.models import save_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of torch's, and nobody has said so."""
    monkeypatch.delenv(VARIABLE, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# what is decided


@dataclass
class Machine:
    """Cores that an engine shares: threads and neighbours that want one get equal shares of them."""

    num_cores: int
    tells_idle: bool = True

    def __post_init__(self) -> None:
        self.decision = Decision(self.num_cores)
        self.now = Reading(0.0, 0.0, 0.0)
        self.idle = 0.0
        self.decision.look(self.now)

    def run(self, seconds: float, num_busy: float, *, is_throttled: bool = False) -> list[int]:
        """Number of threads at each look while so many neighbours are busy."""
        seen = []
        for _ in range(round(seconds / PERIOD)):
            before = self.decision.num
            wanted = before + num_busy
            share = min(1.0, self.num_cores / wanted)
            self.idle += PERIOD * max(0.0, self.num_cores - wanted)
            lowered = before < self.decision.most
            self.now = Reading(
                self.now.at + PERIOD,
                self.now.waited + PERIOD * before * (1 - share),
                self.now.ran + PERIOD * before * share,
                self.idle if lowered and self.tells_idle else None,
                self.now.num_throttled + is_throttled,
            )
            seen.append(self.decision.look(self.now))
        return seen


@pytest.mark.parametrize(("num_cores", "num_busy"), [(2, 1), (2, 4), (4, 1), (8, 3), (64, 1), (64, 40)])
@pytest.mark.parametrize("tells_idle", [True, False])
def test_neighbours_come_and_go(num_cores: int, num_busy: int, tells_idle: bool) -> None:
    machine = Machine(num_cores, tells_idle)
    assert set(machine.run(10, 0)) == {num_cores}
    fewer = machine.run(10, num_busy)
    assert fewer[round(2 * BURST / PERIOD)] < num_cores
    assert fewer[20] + num_busy <= num_cores or fewer[20] == 1 or fewer[20] < 0.7 * num_cores
    assert machine.run(2 * LONGEST, 0)[-1] == num_cores
    if tells_idle:
        machine.run(10, num_busy)
        assert machine.run(num_cores * 3, 0)[-1] == num_cores


@pytest.mark.parametrize("num_cores", [2, 4, 16])
def test_who_stays_is_not_tried_again_and_again(num_cores: int) -> None:
    """While neighbours have cores, more threads cost a look that is as slow as before."""
    machine = Machine(num_cores)
    settled = machine.run(20, 1)[-1]
    seen = machine.run(30, 1)
    assert set(seen) == {settled}
    blind = Machine(num_cores, tells_idle=False)
    blind.run(20, 1)
    seen = blind.run(10 * LONGEST, 1)
    tries = sum(later > earlier for earlier, later in itertools.pairwise(seen))
    assert 5 <= tries <= 15
    assert sum(num > settled for num in seen) / len(seen) < 0.05


def test_the_next_try_after_a_good_one_is_soon() -> None:
    machine = Machine(2, tells_idle=False)
    for _ in range(3):
        machine.run(30, 1)
    machine.run(2 * LONGEST, 0)
    machine.run(1, 1)
    assert machine.decision.num == 1
    assert machine.run(3 * SHORTEST, 0)[-1] == 2


def test_a_burst_and_a_light_neighbour_change_nothing() -> None:
    machine = Machine(2)
    for _ in range(10):
        assert set(machine.run(PERIOD, 2) + machine.run(1, 0.2)) == {2}


def test_a_quota_that_is_used_up_is_no_neighbour() -> None:
    """All threads wait then at the same time, and fewer would have the less."""
    machine = Machine(2)
    assert set(machine.run(10, 2, is_throttled=True)) == {2}
    assert machine.run(10, 2)[-1] == 1


def test_one_long_step_is_enough() -> None:
    decision = Decision(2)
    decision.look(Reading(0.0, 0.0, 0.0))
    assert decision.look(Reading(5.0, 2.5, 2.5)) == 1


@given(
    st.integers(1, 65),
    st.lists(
        st.tuples(st.floats(0.001, 100), *(st.floats(0, 1000),) * 2, st.none() | st.floats(0, 1000)),
        max_size=50,
    ),
)
def test_the_number_stays_within_bounds(most: int, readings: list[tuple[float, ...]]) -> None:
    decision = Decision(most)
    now = Reading(0.0, 0.0, 0.0, 0.0)
    for seconds, waited, ran, idle in readings:
        before = decision.num
        now = Reading(now.at + seconds, now.waited + waited, now.ran + ran, idle)
        assert 1 <= decision.look(now) <= most
        assert waited / seconds >= thread_governor.SIZABLE * 0.999 or decision.num >= before


# what is read


class System:
    """A folder as /proc, and one as /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "groups"
        (self.proc / "self" / "task").mkdir(parents=True)
        self.groups.mkdir()
        (self.proc / "self" / "cgroup").write_text("0::/\n")

    def thread(self, number: int, ran: int, waited: int) -> None:
        (self.proc / "self" / "task" / f"{number}").mkdir(exist_ok=True)
        (self.proc / "self" / "task" / f"{number}" / "schedstat").write_text(f"{ran} {waited} 7\n")

    def stat(self, *idle: int) -> None:
        cores = [f"cpu{core} 1 2 3 {ticks} 10 6 7 8 9 0" for core, ticks in enumerate(idle)]
        lines = [f"cpu  1 2 3 {sum(idle)} 0 6 7 8 9 0", *cores, "intr 12 3 4", ""]
        (self.proc / "stat").write_text("\n".join(lines))

    def counters(self, *cores: int) -> WaitCounters:
        return WaitCounters(self.proc, self.groups, cores or (0, 1))


def test_threads_that_end_take_nothing_away(tmp_path: Path) -> None:
    system = System(tmp_path)
    system.thread(1, 10**9, 10**8)
    system.thread(2, 2 * 10**9, 0)
    counters = system.counters()
    first = counters.read(0.0, with_idle=False)
    assert (first.ran, first.waited, first.idle) == (3.0, 0.1, None)
    system.thread(1, 15 * 10**8, 2 * 10**8)
    (tmp_path / "proc/self/task/2/schedstat").unlink()
    system.thread(3, 10**8, 3 * 10**8)
    second = counters.read(1.0, with_idle=False)
    assert second.ran - first.ran == pytest.approx(0.6)
    assert second.waited - first.waited == pytest.approx(0.4)


def test_only_our_cores_are_idle(tmp_path: Path) -> None:
    system = System(tmp_path)
    system.stat(100, 200, 400, 800)
    assert system.counters(1, 2).read(0.0, with_idle=True).idle == 6.2  # ticks of 10 ms, and 10 for disks
    assert system.counters(3, 4).read(0.0, with_idle=True).idle is None
    (tmp_path / "proc/stat").write_text("cpu0 nonsense\n")
    assert system.counters(0).read(0.0, with_idle=True).idle is None
    (tmp_path / "proc/stat").unlink()
    assert system.counters(0).read(0.0, with_idle=True).idle is None


def test_a_quota_is_seen_to_be_used_up(tmp_path: Path) -> None:
    system = System(tmp_path)
    (system.groups / "cpu.max").write_text("150000 100000\n")
    counters = system.counters()
    assert counters.read(0.0, with_idle=False).num_throttled == 0
    (system.groups / "cpu.stat").write_text("usage_usec 5\nnr_periods 9\nnr_throttled 4\nthrottled_usec 6\n")
    assert counters.read(0.0, with_idle=False).num_throttled == 4


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    system = System(tmp_path)
    assert not system.counters().are_told
    system.thread(1, 0, 0)
    assert not system.counters().are_told
    system.thread(1, 1, 0)
    assert system.counters().are_told


def test_this_system_tells() -> None:
    counters = WaitCounters()
    if not counters.are_told:
        pytest.skip("this system does not tell how long threads waited")
    first = counters.read(0.0, with_idle=True)
    begin = time.thread_time()
    while time.thread_time() - begin < 0.05:
        pass
    second = counters.read(1.0, with_idle=True)
    assert second.ran - first.ran > 0.04
    assert first.idle is not None
    assert second.idle is not None
    assert second.idle >= first.idle


# who sets the number


class Scripted(WaitCounters):
    """Threads wait for half of a core, or nothing does."""

    def __init__(self) -> None:
        super().__init__()
        self.are_busy = True
        self.num_reads = 0

    def read(self, at: float, *, with_idle: bool) -> Reading:
        self.num_reads += 1
        waited = at / 2 if self.are_busy else 0.0
        return Reading(at, waited, at, 2 * at if with_idle else None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = 1000.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(thread_governor.time, "monotonic", lambda: now)
    return advance


def steps(governor: ThreadGovernor, clock: Callable[[float], None], seconds: float) -> int:
    """How many threads the last one had."""
    for _ in range(round(seconds / 0.03)):
        clock(0.03)
        num = governor.run(torch.get_num_threads)
    return num


def test_torch_is_told_and_the_log_once(
    two_threads: None, clock: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    counters = Scripted()
    governor = ThreadGovernor(counters)
    assert steps(governor, clock, 1) == 1
    assert counters.num_reads < 10  # not after every step
    assert torch.get_num_threads() == 2  # between steps
    assert governor.num_threads == 1
    counters.are_busy = False
    assert steps(governor, clock, 0.5) == 1
    assert steps(governor, clock, 3) == 2
    counters.are_busy = True
    assert steps(governor, clock, 1) == 1
    assert [record.message.partition(" until")[0] for record in caplog.records] == [
        "other processes keep cores busy: kernels take 1 of 2 threads"
    ]


def test_who_sets_another_number_is_obeyed(two_threads: None, clock: Callable[[float], None]) -> None:
    governor = ThreadGovernor(Scripted())
    assert steps(governor, clock, 1) == 1
    torch.set_num_threads(3)
    assert steps(governor, clock, 5) == 3
    assert governor.num_threads == 3


def test_a_step_that_fails_leaves_the_number(two_threads: None, clock: Callable[[float], None]) -> None:
    governor = ThreadGovernor(Scripted())
    assert steps(governor, clock, 1) == 1

    def fail() -> None:
        raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        governor.run(fail)
    assert torch.get_num_threads() == 2
    assert governor.run(torch.get_num_threads) == 1


def test_another_thread_may_run_steps(two_threads: None, clock: Callable[[float], None]) -> None:
    """OpenMP's number is one a thread."""
    governor = ThreadGovernor(Scripted())
    seen = []

    def run() -> None:
        seen.append(steps(governor, clock, 1))
        seen.append(torch.get_num_threads())

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert seen == [1, 2, 1, 2]
    assert steps(governor, clock, 1) == 1


def test_a_look_costs_a_thousandth(two_threads: None, clock: Callable[[float], None]) -> None:
    class Slow(Scripted):
        def read(self, at: float, *, with_idle: bool) -> Reading:
            clock(0.001)
            return super().read(at, with_idle=with_idle)

    counters = Slow()
    governor = ThreadGovernor(counters)
    steps(governor, clock, 10)
    assert counters.num_reads <= 11


def test_nothing_is_done_where_the_user_says_how_many(
    monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    monkeypatch.setattr(WaitCounters, "are_told", True)
    assert isinstance(govern_threads(), ThreadGovernor)
    monkeypatch.setattr(WaitCounters, "are_told", False)
    assert govern_threads() is None
    monkeypatch.setattr(WaitCounters, "are_told", True)
    torch.set_num_threads(1)
    assert govern_threads() is None
    torch.set_num_threads(2)
    monkeypatch.setenv(VARIABLE, "2")
    assert govern_threads() is None


@pytest.mark.parametrize(
    ("options", "is_governed"),
    [({}, True), ({"kernels.pointwise": "torch_native"}, False), ({"kernels.ssm": "reference"}, False)],
)
def test_only_where_results_depend_on_no_threads(
    monkeypatch: pytest.MonkeyPatch, two_threads: None, options: dict[str, str], is_governed: bool
) -> None:
    made = []
    monkeypatch.setattr("hybridserve.engine.executor.govern_threads", lambda: made.append(1))
    with LLM("demo", **options) as llm:
        assert bool(made) == is_governed
        assert llm.stats()["num_threads"] == 2


# a real engine


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    command = [sys.executable, "-S", "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.skipif(len(psutil.Process().cpu_affinity() or [0]) < 2, reason="one core: nothing to give up")
def test_an_engine_beside_busy_processes(
    two_threads: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More than three times as fast as with as many threads as there are cores."""
    num_cores = len(psutil.Process().cpu_affinity() or [0])
    torch.set_num_threads(num_cores)
    if govern_threads() is None:
        pytest.skip("this system does not tell how long threads waited")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
    save_model("llama", tmp_path, seed=1, **sizes)

    def seconds(llm: LLM) -> float:
        """For a few tokens."""
        begin = time.monotonic()
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        return time.monotonic() - begin

    with neighbours(2 * num_cores):
        with LLM(str(tmp_path), max_num_seqs=2) as llm:
            deadline = time.monotonic() + 60
            while llm.stats()["num_threads"] > num_cores // 2:
                assert time.monotonic() < deadline
                seconds(llm)
            governed = statistics.median(seconds(llm) for _ in range(3))
        assert torch.get_num_threads() == num_cores
        monkeypatch.setenv(VARIABLE, f"{num_cores}")
        with LLM(str(tmp_path), max_num_seqs=2) as llm:
            fixed = statistics.median(seconds(llm) for _ in range(3))
            assert llm.stats()["num_threads"] == num_cores
    assert 3 * governed < fixed
