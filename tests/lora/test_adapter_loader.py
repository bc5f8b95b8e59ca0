"""The loader's thread: outcomes in order, on the right thread, whatever goes wrong in between."""

from __future__ import annotations

import gc
import itertools
import math
import threading
import time
from functools import partial

import pytest

from hybridserve.lora import loader as loader_module
from hybridserve.lora.loader import LEISURE, Loader
from tests.harness.interrupts import InterruptAt


def drain(loader: Loader) -> None:
    deadline = time.monotonic() + 10
    while loader.num_pending:
        assert time.monotonic() < deadline
        loader.wait(1)
        loader.poll()


def test_work_runs_elsewhere_and_its_outcome_here() -> None:
    loader = Loader("test")
    threads: list[str] = []
    outcomes: list[object] = []

    def work(number: int) -> int:
        threads.append(threading.current_thread().name)
        return number

    for number in range(5):
        loader.submit(partial(work, number), outcomes.append)
    assert loader.num_pending == 5
    drain(loader)
    assert outcomes == [0, 1, 2, 3, 4]
    assert set(threads) == {"test"}
    loader.close()


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), KeyboardInterrupt(), SystemExit()])
def test_an_error_is_an_outcome_and_the_next_one_works(error: BaseException) -> None:
    loader = Loader("test")
    outcomes: list = []

    def fail() -> None:
        raise error

    loader.submit(fail, outcomes.append)
    loader.submit(lambda: 1, outcomes.append)
    drain(loader)
    assert isinstance(outcomes[0], Exception)
    assert outcomes[1] == 1
    loader.close()


def test_an_interruption_while_an_outcome_is_taken_in_loses_nothing() -> None:
    loader = Loader("test")
    calls = []

    def then(outcome: object) -> None:
        calls.append(outcome)
        if len(calls) == 1:
            raise KeyboardInterrupt

    loader.submit(lambda: 7, then)
    loader.wait(10)
    with pytest.raises(KeyboardInterrupt):
        loader.poll()
    drain(loader)
    assert calls == [7, 7]
    loader.close()


def test_waiting_ends_when_there_is_news_and_when_there_is_nothing_to_wait_for() -> None:
    loader = Loader("test")
    begin = time.monotonic()
    loader.wait(60)
    gate = threading.Event()
    loader.submit(lambda: gate.wait(10), lambda _: None)
    loader.wait(0.01)
    gate.set()
    loader.wait(60)
    assert time.monotonic() - begin < 10
    drain(loader)
    loader.close()


def test_an_interrupt_at_any_point_leaves_the_loader_working() -> None:
    """Of the calls that waiting for it and polling it make, one after the other."""
    for number in itertools.count(1):
        loader, outcomes = Loader("test"), []
        loader.submit(lambda: 1, outcomes.append)
        loader.submit(lambda: 2, outcomes.append)
        time.sleep(0.002)
        with InterruptAt(number, r"/loader\.py$|/threading\.py$") as point:
            loader.poll()
            loader.wait(0.002)
            loader.poll()
        drain(loader)
        loader.submit(lambda: 3, outcomes.append)
        drain(loader)
        assert sorted(set(outcomes)) == [1, 2, 3]  # one that was interrupted when it was taken in comes again
        loader.close()
        if not point.has_raised:
            assert number > 10
            break


def test_work_leaves_time_to_steps_only_while_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, slept = Loader("test"), []
    now = [100.0]
    monkeypatch.setattr(loader_module.time, "sleep", slept.append)
    monkeypatch.setattr(loader_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(loader_module.time, "thread_time", lambda: now[0])

    def pauses() -> bool:
        slept.clear()
        now[0] += 0.01
        loader.pause()
        return slept == [pytest.approx(0.01 * LEISURE)]

    loader.pause()
    assert not pauses()
    loader.leave_time(math.inf)
    assert pauses()
    loader.leave_time(0.015)
    assert pauses()
    assert not pauses()
    loader.leave_time(math.inf)
    loader.leave_time(0)
    assert not pauses()


def test_close_ends_the_thread_and_drops_what_waits() -> None:
    loader = Loader("test")
    started, gate, ran = threading.Event(), threading.Event(), []
    loader.submit(lambda: (started.set(), gate.wait(10)), ran.append)
    loader.submit(lambda: ran.append("second"), ran.append)
    assert started.wait(10)
    threading.Timer(0.05, gate.set).start()
    loader.close()
    loader.close()
    assert ran == []
    assert not any(thread.name == "test" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        loader.submit(lambda: None, lambda _: None)


def test_a_loader_that_nobody_closes_ends_its_thread_when_it_is_forgotten() -> None:
    loader = Loader("forgotten")
    loader.submit(lambda: None, lambda _: None)
    drain(loader)
    thread = next(thread for thread in threading.enumerate() if thread.name == "forgotten")
    del loader
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
