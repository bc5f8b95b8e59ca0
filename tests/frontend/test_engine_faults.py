"""Whatever happens to an engine's process or to its client: everybody is told once, in time, and no process
is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from hybridserve import AsyncLLM, SamplingParams
from hybridserve.engine.messages import EngineRequest
from hybridserve.frontend.errors import EngineDead, EngineState, EngineUnavailable
from hybridserve.frontend.process import EngineProcess
from hybridserve.frontend.protocol import (
    Add,
    Channel,
    Failed,
    FromEngine,
    Outputs,
    PeerGone,
    Start,
    ToEngine,
    decode,
    encode,
)
from tests.harness.faulty_engine import FAULT, LONG_SECONDS, STEP_OF_FAULT
from tests.harness.processes import end, is_running, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator
    from pathlib import Path

T = TypeVar("T")

HEARTBEAT = 1.0
LONG = SamplingParams(max_tokens=50_000)
SHORT = SamplingParams(max_tokens=20)


class FaultyLLM(AsyncLLM):
    _entry = "tests.harness.faulty_engine"

    async def start(self, **options: Any) -> None:
        """`loads`: the process has got that far."""
        self.loads = asyncio.Event()
        await super().start(on_phase=lambda name, seconds: self.loads.set() if name == "load" else None)


def faulty() -> FaultyLLM:
    return FaultyLLM("demo", heartbeat_seconds=HEARTBEAT)


def pid_of(engine: AsyncLLM) -> int:
    assert engine._client is not None
    assert wait_until(lambda: engine._client.process.pid is not None)
    return engine._client.process.pid


@contextlib.asynccontextmanager
async def started(fault: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultyLLM]:
    """One that may not be ready; afterwards nothing of it is left."""
    monkeypatch.setenv(FAULT, fault)
    engine = faulty()
    await engine.start()
    try:
        yield engine
    finally:
        pid = pid_of(engine)
        await engine.close()
        try:
            assert not is_running(pid)
            assert wait_until(lambda: not engine_threads())
        finally:
            end(pid)


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run it. A test of something that waits for ever fails."""
    return asyncio.run(asyncio.wait_for(work, 30))


def engine_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("hybridserve-engine")]


async def generate(engine: AsyncLLM, params: SamplingParams = LONG) -> list[int]:
    token_ids: list[int] = []
    async for output in engine.generate([1, 2], params):
        token_ids = output.outputs[0].token_ids
    return token_ids


async def first_tokens(engine: AsyncLLM, count: int) -> list[asyncio.Task[list[int]]]:
    """So many requests that have begun."""
    tasks = [asyncio.create_task(generate(engine)) for _ in range(count)]
    while (await engine.stats())["num_running"] < count:  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0.01)
    return tasks


STEP_FAULTS = {
    "raise": (
        0.5,
        r"^the engine failed: RuntimeError: a step could not be computed; "
        r"caused by OSError: the device is gone$",
    ),
    "exit": (0.5, r"^the engine's process has exited with status 3$"),
    "garbage": (0.5, r"^the engine's process was ended: what came is not a frame$"),
    "hang": (HEARTBEAT + 1, r"^the engine has been stuck in a step for \d\.\d s$"),
    "hang-with-gil": (HEARTBEAT + 1, r"^the engine's process has not answered for \d\.\d s$"),
}


@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_b034_whoever_waits_is_told_once_and_in_time(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, message = STEP_FAULTS[fault]
    deaths: list[EngineDead] = []

    async def run() -> None:
        async with started(fault, monkeypatch) as engine:
            engine.on_death(deaths.append)
            await engine.wait_ready()
            begin = time.monotonic()
            results = await asyncio.gather(*(generate(engine) for _ in range(8)), return_exceptions=True)
            assert time.monotonic() - begin < seconds
            assert {type(result) for result in results} == {EngineDead}
            assert len({id(result) for result in results}) == 8
            for result in results:
                with pytest.raises(EngineDead, match=message):
                    raise result
            assert engine.state is EngineState.DEAD
            assert engine.num_in_flight == 0
            for attempt in (engine.submit([1]), engine.stats(), engine.list_adapters(), engine.wait_ready()):
                with pytest.raises(EngineDead, match=message):
                    await attempt
            assert await engine.drain(0)

    complete(run())
    assert [str(death) for death in deaths] == [str(deaths[0])]


def test_a_failure_comes_with_the_traceback_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with started("raise", monkeypatch) as engine:
            await engine.wait_ready()
            with pytest.raises(EngineDead) as caught:
                await generate(engine)
            assert "Traceback" not in str(caught.value)
            assert 'raise OSError("the device is gone")' in caught.value.details

    complete(run())


def test_what_came_before_the_end_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with started("exit", monkeypatch) as engine:
            await engine.wait_ready()
            stream = await engine.submit([1], LONG)
            await asyncio.sleep(0.2)
            assert [delta.token_ids for delta in await anext(stream)] == [[0], [1]]
            for _ in range(2):
                with pytest.raises(EngineDead):
                    await anext(stream)

    complete(run())


def test_a_long_step_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with started("compute", monkeypatch) as engine:
            await engine.wait_ready()
            task = asyncio.create_task(generate(engine, SHORT))
            await asyncio.sleep(LONG_SECONDS / 2)
            assert engine.step_seconds > LONG_SECONDS / 6
            assert len(await task) == 20

    assert LONG_SECONDS > 2 * HEARTBEAT
    complete(run())


def test_an_engine_with_nothing_to_do_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with started("", monkeypatch) as engine:
            await engine.wait_ready()
            await asyncio.sleep(2.5 * HEARTBEAT)
            assert engine.state is EngineState.READY
            assert engine.step_seconds == 0
            assert len(await generate(engine, SHORT)) == 20

    complete(run())


def test_the_engine_ends_what_it_has_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    monkeypatch.setenv("HYBRIDSERVE_TEST_PID_FILE", str(file))

    async def run() -> None:
        async with started("child", monkeypatch) as engine:
            await engine.wait_ready()
            with pytest.raises(EngineDead):
                await generate(engine)

    complete(run())
    pid = int(file.read_text())
    try:
        assert wait_until(lambda: not is_running(pid))
    finally:
        end(pid)


# ---- while it loads


def test_a_mistake_while_loading_is_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match=r"^model: no such directory$"):
            async with started("load-mistake", monkeypatch) as engine:
                await engine.wait_ready()
        assert engine.state is EngineState.DEAD

    complete(run())


@pytest.mark.parametrize(
    ("fault", "message"),
    [("load-raise", "caused by OSError: the device is gone$"), ("load-garbage", "what came is not a frame")],
)
def test_a_failure_while_loading_is_death(fault: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        with pytest.raises(EngineDead, match=message):
            async with started(fault, monkeypatch) as engine:
                await engine.wait_ready()

    complete(run())


def test_while_it_loads_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = faulty()
        assert engine.state is EngineState.STARTING
        for attempt in (engine.submit([1]), engine.stats(), engine.wait_ready(), engine.abort("a")):
            with pytest.raises(EngineUnavailable, match="has not been started"):
                await attempt
        async with started("load-hang", monkeypatch) as engine:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2 * HEARTBEAT):  # loading has no limit
                    await engine.wait_ready()
            assert engine.state is EngineState.STARTING
            for attempt in (engine.submit([1]), engine.stats()):
                with pytest.raises(EngineUnavailable, match="the engine is starting"):
                    await attempt
            with pytest.raises(EngineUnavailable):
                engine.plan  # noqa: B018
            waiting = asyncio.create_task(engine.wait_ready())
            await asyncio.sleep(0)
            await engine.close()
            with pytest.raises(EngineDead, match="was closed"):
                await waiting

    complete(run())


def test_leaving_while_it_loads_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Ctrl-C cancels `async with`."""
    monkeypatch.setenv(FAULT, "load-hang")
    engine = faulty()

    async def run() -> None:
        async with engine:
            raise AssertionError("it never gets ready")

    async def cancel() -> int:
        task = asyncio.create_task(run())
        await asyncio.sleep(0.5)
        pid = pid_of(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pid

    assert not is_running(complete(cancel()))


def test_an_entry_that_can_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultyLLM, "_entry", "tests.harness.no_such_module")

    async def run() -> None:
        with pytest.raises(EngineDead, match="has exited with status 1"):
            async with started("", monkeypatch) as engine:
                await engine.wait_ready()

    complete(run())


def test_a_python_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")

    async def run() -> None:
        engine = faulty()
        await engine.start()
        with pytest.raises(EngineDead, match=r"could not be started: .*/no/such/python"):
            await engine.wait_ready()
        await engine.close()

    complete(run())


# ---- signals (server.md 5e)


@pytest.mark.parametrize("when", ["loading", "idle", "streaming"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT])
def test_b034_b036_a_signal_to_the_engine(
    number: signal.Signals, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with started("load-hang" if when == "loading" else "", monkeypatch) as engine:
            pid = pid_of(engine)
            tasks = []
            if when == "loading":
                await engine.loads.wait()
                tasks.append(asyncio.create_task(engine.wait_ready()))
            else:
                await engine.wait_ready()
            if when == "streaming":
                tasks = await first_tokens(engine, 4)
            died = asyncio.Event()
            engine.on_death(lambda error: died.set())
            begin = time.monotonic()
            os.kill(pid, number)
            if number in (signal.SIGTERM, signal.SIGINT) or (number, when) == (signal.SIGSTOP, "loading"):
                await asyncio.sleep(0.3)  # nothing happens: the client decides
                assert engine.state is (EngineState.STARTING if when == "loading" else EngineState.READY)
                assert not any(task.done() for task in tasks)
                for task in tasks:
                    task.cancel()
                if when != "loading":
                    assert len(await generate(engine, SHORT)) == 20
                return
            await died.wait()
            assert engine.state is EngineState.DEAD
            limit = HEARTBEAT + 1 if number == signal.SIGSTOP else 1.0
            assert time.monotonic() - begin < limit
            why = "has not answered for" if number == signal.SIGSTOP else "was ended by SIGKILL"
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                with pytest.raises(EngineDead, match=why):
                    raise result

    complete(run())


def test_nothing_secret_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no use for the keys of users."""
    sent: list[bytes] = []
    monkeypatch.setenv(FAULT, "")
    monkeypatch.setattr(EngineProcess, "send", lambda self, payload: sent.append(payload))

    async def run() -> None:
        engine = FaultyLLM("demo", api_keys=["a-secret-key"])
        await engine.start()
        while not sent:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.close()

    complete(run())
    assert isinstance(decode(sent[0], ToEngine), Start)
    assert b"a-secret-key" not in b"".join(sent)


def test_ctrl_c_in_the_terminal_is_not_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with started("", monkeypatch) as engine:
            assert os.getpgid(pid_of(engine)) != os.getpgid(0)

    complete(run())


CLIENT = """
    import asyncio, sys
    from hybridserve import SamplingParams
    from tests.frontend.test_engine_faults import faulty, first_tokens, pid_of

    async def main():
        engine = faulty()
        await engine.start()
        pid = pid_of(engine)
        await (engine.loads.wait() if sys.argv[1] == "loading" else engine.wait_ready())
        if sys.argv[1] in ("streaming", "in a step"):
            tasks = [asyncio.create_task(one(engine)) for _ in range(4)]
            await asyncio.sleep(0.2)
        print(pid, flush=True)
        if sys.argv[1] == "left":
            return  # neither closed nor waited for
        await asyncio.sleep(600)

    async def one(engine):
        async for _ in engine.generate([1], SamplingParams(max_tokens=50_000)):
            pass

    asyncio.run(main())
    if sys.argv[1] == "left":
        import time
        time.sleep(600)
"""


@contextlib.contextmanager
def client(state: str, fault: str, monkeypatch: pytest.MonkeyPatch):
    """A program that uses an engine; yields it and the engine's pid."""
    monkeypatch.setenv(FAULT, fault)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CLIENT), state], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    pid = None
    try:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        yield program, pid
    finally:
        program.kill()
        if pid is not None:
            end(pid)  # first: it writes where the program does
        program.communicate()


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ("loading", "load-hang"),
        ("idle", ""),
        ("streaming", ""),
        ("in a step", "hang"),
        ("in a step", "hang-with-gil"),  # only the kernel can end that one
    ],
)
def test_b036_the_engine_ends_with_its_client(
    state: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(state, fault, monkeypatch) as (program, pid):
        assert is_running(pid)
        os.kill(program.pid, signal.SIGKILL)
        assert wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize("state", ["loading", "idle", "streaming"])
def test_b036_ctrl_c_ends_both(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with client(state, "load-hang" if state == "loading" else "", monkeypatch) as (program, pid):
        os.kill(program.pid, signal.SIGINT)
        program.wait(timeout=10)
        assert wait_until(lambda: not is_running(pid))


def test_an_engine_that_nobody_closed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop has gone, the program has not."""
    with client("left", "", monkeypatch) as (program, pid):
        assert wait_until(lambda: not is_running(pid))
        assert program.poll() is None


def test_a_client_that_was_stopped_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, and later fg: no time went by for it."""
    with client("streaming", "", monkeypatch) as (program, pid):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(pid, number)
            os.kill(program.pid, number)
            time.sleep(2 * HEARTBEAT)
        assert is_running(pid)
        assert program.poll() is None


@contextlib.contextmanager
def bare_engine() -> Iterator[tuple[Channel, socket.socket, subprocess.Popen[bytes]]]:
    """An engine's process that nobody watches."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.faulty_engine", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
    channel = Channel(ours)
    try:
        yield channel, ours, process
    finally:
        channel.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize("message", [b"\x00" * 64, b"hsv1\x01\x00\x00\x00\xc1"])
def test_s001_the_engine_refuses_what_is_no_message(message: bytes) -> None:
    """One error, by name, and the process is gone."""
    messages = []
    with bare_engine() as (channel, sock, process):
        sock.sendall(message)
        with contextlib.suppress(PeerGone):
            while True:
                messages += [decode(payload, FromEngine) for payload in channel.receive()]
        assert process.wait(timeout=10) == 1
    assert [type(message) for message in messages] == [Failed]
    assert "ProtocolError: what came is not a" in messages[0].reason
    assert not messages[0].is_value_error


def test_b036_the_engine_ends_when_its_client_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step, and though the client lives."""
    monkeypatch.setenv(FAULT, "hang")
    request = EngineRequest(request_id="1", prompt_ids=[1], params=LONG)
    with bare_engine() as (channel, _, process):
        channel.send(encode(Start("{}", "", 10.0)))
        channel.send(encode(Add(request)))
        messages: list[object] = []
        while sum(isinstance(message, Outputs) for message in messages) < STEP_OF_FAULT - 1:
            messages += [decode(payload, FromEngine) for payload in channel.receive()]
        time.sleep(0.1)
        assert process.poll() is None
        channel.hang_up()
        assert process.wait(timeout=10) == 0


def test_an_engine_that_does_not_close_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with started("close-hang", monkeypatch) as engine:
            await engine.wait_ready()
            begin = time.monotonic()
            await engine.close()
            assert time.monotonic() - begin < HEARTBEAT + 1

    complete(run())


def test_closing_tells_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[EngineDead] = []

    async def run() -> None:
        async with started("", monkeypatch) as engine:
            engine.on_death(deaths.append)
            await engine.wait_ready()
            tasks = await first_tokens(engine, 2)
            await engine.close()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                with pytest.raises(EngineDead, match=r"^the engine was closed$"):
                    raise result
            await engine.close()

    complete(run())
    assert deaths == []  # it was wanted
