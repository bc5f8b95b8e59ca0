"""Signals to `hybridserve serve`: to either of its processes, while it loads, rests or streams.

Whatever happens, no process is left after five seconds, and the port can be had again. What a draining server
does for its clients is in test_process; what happens to an engine without a server, in test_engine_faults.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.harness.processes import end, is_running, wait_until
from tests.harness.serve_process import Server, server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
LEFT_SECONDS = 5.0
LONG = {"prompt": "for the", "max_tokens": 4000, "ignore_eos": True, "stream": True}


class Situation:
    """A server in one of its states, and all processes that belong to it."""

    def __init__(self, one: Server, state: str) -> None:
        self.server = one
        self.port = one.port
        self.engine_pid = one.engine_pid
        self.pids = [one.process.pid, self.engine_pid]
        self.stream: http.client.HTTPResponse | None = None
        if state == "streaming":
            self.stream = one.request("POST", "/v1/completions", LONG)
            assert self.stream.read(20)

    def check_gone(self) -> None:
        """Nothing runs any more, and somebody else can listen where the server did."""
        assert wait_until(lambda: not any(map(is_running, self.pids)), LEFT_SECONDS), self._running()
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            listener.listen()

    def _running(self) -> list[str]:
        found = []
        for pid in self.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(" ".join(psutil.Process(pid).cmdline()))
        return found

    def last_words(self) -> bytes:
        """What the stream still brings, until it ends or breaks."""
        assert self.stream is not None
        try:
            return self.stream.read()
        except http.client.IncompleteRead as error:
            return error.partial
        except OSError:
            return b""


@contextlib.contextmanager
def situation(state: str) -> Iterator[Situation]:
    with server(ready=False) as one:
        one.wait_listening()
        assert wait_until(lambda: len(psutil.Process(one.process.pid).children()) == 1, 30)
        if state != "loading":
            one.wait_ready()
        where = Situation(one, state)
        try:
            yield where
        finally:
            for pid in where.pids[1:]:
                end(pid)


@pytest.mark.parametrize("state", ["idle", "streaming"])
def test_b036_the_server_is_killed(state: str) -> None:
    """While loading: test_process has it."""
    with situation(state) as where:
        where.server.signal(KILL)
        assert where.server.wait_exit() == -KILL
        where.check_gone()
        if state == "streaming":
            assert not where.last_words().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("number", "status"), [(TERM, 0), (INT, 130)])
def test_b036_a_server_that_rests_is_asked_to_end(number: int, status: int) -> None:
    with situation("idle") as where:
        where.server.signal(number)
        assert where.server.wait_exit() == status
        where.check_gone()
        assert "Traceback" not in "\n".join(where.server.log)


@pytest.mark.parametrize("state", ["loading", "streaming"])
def test_b036_a_second_ctrl_c_forces(state: str) -> None:
    """And a third and fourth change nothing."""
    with situation(state) as where:
        where.server.signal(INT)
        if state == "streaming":
            assert wait_until(lambda: where.server.get("/health/ready")[0] == 503, 30)
        for _ in range(3):
            with contextlib.suppress(ProcessLookupError):
                where.server.signal(INT)
        assert where.server.wait_exit() == 130
        where.check_gone()
        if state == "streaming":
            assert b'"message":"the server is being stopped"' in where.last_words()
        assert "Traceback" not in "\n".join(where.server.log)


@pytest.mark.parametrize("state", ["loading", "idle", "streaming"])
def test_b034_the_engine_is_killed(state: str) -> None:
    """The server says so, and ends with a status that makes a supervisor start it again."""
    with situation(state) as where:
        os.kill(where.engine_pid, KILL)
        assert where.server.wait_exit() == 1
        where.check_gone()
        assert any("ended by SIGKILL" in line for line in where.server.log)
        assert "Traceback" not in "\n".join(where.server.log)
        if state == "streaming":
            words = where.last_words()
            assert words.count(b'"code":"engine_failed"') == 1
            assert words.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("number", [TERM, INT])
@pytest.mark.parametrize("state", ["loading", "idle", "streaming"])
def test_b036_the_engine_leaves_signals_to_the_server(state: str, number: int) -> None:
    """A terminal, or who stops a service, sends them to both; only the server may judge."""
    with situation(state) as where:
        os.kill(where.engine_pid, number)
        where.server.wait_ready()
        assert where.server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200
        assert is_running(where.engine_pid)
        if where.stream is not None:
            assert where.stream.read(20)
            where.stream.close()


@pytest.mark.parametrize("number", [TERM, INT])
def test_b036_both_get_the_signal_and_what_runs_is_finished(number: int) -> None:
    """As systemd (KillMode=control-group) and `docker stop` with a shell in front do it."""
    with situation("idle") as where:
        body = {**LONG, "max_tokens": 300}
        streams = [where.server.request("POST", "/v1/completions", body) for _ in range(4)]
        for stream in streams:
            assert stream.read(20)
        for pid in reversed(where.pids):
            os.kill(pid, number)
        for stream in streams:
            rest = stream.read()
            assert b'"finish_reason":"length"' in rest
            assert rest.endswith(b"data: [DONE]\n\n")
        assert where.server.wait_exit() == (0 if number == TERM else 130)
        where.check_gone()


def test_b036_the_port_is_free_for_the_next_server() -> None:
    """With connections of the last one still in TIME_WAIT, or open at the client's end."""
    with situation("streaming") as where:
        where.server.signal(KILL)
        where.server.wait_exit()
        where.check_gone()
        with server("--port", str(where.port), ready=False) as following:
            following.wait_listening()
            assert following.port == where.port
            following.signal(TERM)
            assert following.wait_exit() == 0
