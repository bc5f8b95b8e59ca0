"""When signals are handled, block by block."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from hybridserve.engine.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def handler(number: signal.Signals, function) -> Iterator[None]:
    before = signal.signal(number, function)
    try:
        yield
    finally:
        assert signal.getsignal(number) is function, "the program's handler was not put back"
        signal.signal(number, before)


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with handler(signal.SIGINT, signal.default_int_handler):
        yield


def test_what_comes_is_raised_when_the_outermost_block_ends() -> None:
    interrupts, done = Interrupts(), []
    with pytest.raises(KeyboardInterrupt), interrupts.held():  # noqa: PT012
        with interrupts.held():
            interrupt()
            done.append("inner")
        interrupt()
        done.append("outer")
    assert done == ["inner", "outer"]
    with interrupts.held():
        pass  # and not again


def test_it_prevails_over_what_the_block_raises() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, Interrupts().held():  # noqa: PT012
        interrupt()
        raise ValueError("no")
    assert isinstance(caught.value.__context__, ValueError)


def test_it_is_let_through_at_once_and_before_anything_else() -> None:
    interrupts, done = Interrupts(), []

    def work() -> None:
        try:
            with interrupts.let_through():
                done.append("let through")
                interrupt()
                done.append("too late")
        except KeyboardInterrupt:
            interrupt()
            done.append("cleaned up")
            raise

    with pytest.raises(KeyboardInterrupt), interrupts.held():
        work()
    assert done == ["let through", "cleaned up"]
    done.clear()
    with pytest.raises(KeyboardInterrupt), interrupts.held():  # noqa: PT012
        interrupt()
        work()
    assert done == ["cleaned up"]


def test_a_block_that_is_held_within_one_that_lets_through() -> None:
    interrupts, done = Interrupts(), []
    with pytest.raises(KeyboardInterrupt), interrupts.held(), interrupts.let_through():  # noqa: PT012
        with interrupts.held():
            interrupt()
            done.append("held")
        done.append("too late")
    assert done == ["held"]


def test_a_block_that_a_signal_left_half_way_does_not_count() -> None:
    """As where it comes between two instructions of `__exit__`."""
    interrupts, done = Interrupts(), []
    with pytest.raises(KeyboardInterrupt), interrupts.held():  # noqa: PT012
        try:
            interrupts.let_through().__enter__()
            interrupt()
        except KeyboardInterrupt:
            with interrupts.held():
                interrupt()
            done.append("cleaned up")
            raise
    assert done == ["cleaned up"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_python_loses_is_raised_when_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the course of a collection is printed, and the program goes on."""

    class Interrupted:
        def __del__(self) -> None:
            interrupt()

    lost = []
    monkeypatch.setattr("sys.unraisablehook", lambda each: lost.append(each.exc_type))
    interrupts, done = Interrupts(), []
    with pytest.raises(KeyboardInterrupt), interrupts.held():  # noqa: PT012
        with interrupts.let_through():
            Interrupted()
            done.append("goes on")
        done.append("held")
        with interrupts.let_through():
            done.append("too late")
    assert (lost, done) == ([KeyboardInterrupt], ["goes on", "held"])
    with interrupts.held(), interrupts.let_through():
        pass  # and not again


def test_without_a_block_that_is_held_nothing_changes() -> None:
    interrupts = Interrupts()
    with interrupts.held():
        pass
    with handler(signal.SIGINT, lambda *_: None), interrupts.let_through():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_a_programs_own_handlers_are_called() -> None:
    calls = []

    def alarm(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    interrupts = Interrupts()
    with handler(signal.SIGALRM, alarm), interrupts.held():
        signal.raise_signal(signal.SIGALRM)
        assert calls == []
        with interrupts.let_through():
            assert calls == [signal.SIGALRM]
            signal.raise_signal(signal.SIGALRM)
            assert len(calls) == 2
            signal.raise_signal(signal.SIGALRM)
            assert len(calls) == 3
        signal.raise_signal(signal.SIGALRM)
        assert len(calls) == 3
    assert len(calls) == 4


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_is_left_alone(ignored: signal.Handlers) -> None:
    with handler(signal.SIGINT, ignored), Interrupts().held():
        assert signal.getsignal(signal.SIGINT) is ignored


def test_two_engines_in_one_program() -> None:
    mine, other, done = Interrupts(), Interrupts(), []
    with pytest.raises(KeyboardInterrupt), mine.held():  # noqa: PT012
        with other.held():
            interrupt()
            done.append("other")
        done.append("mine")
    assert done == ["other", "mine"]
    with pytest.raises(KeyboardInterrupt), mine.held(), mine.let_through(), other.held():  # noqa: PT012
        interrupt()
        done.append("third")
    assert done[2:] == ["third"]


def test_in_another_thread_nothing_happens() -> None:
    interrupts, seen = Interrupts(), []

    def work() -> None:
        with interrupts.held(), interrupts.let_through(), interrupts.held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
