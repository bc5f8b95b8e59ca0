"""`hybridserve serve` as a process of the test: started, asked over its port, watched, ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.harness.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
IDLE_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_blocks_used", "state_slots_used")
"""Zero on a server that nobody uses."""


class Server:
    """A process that serves; its log is read as it is written."""

    def __init__(self, *arguments: str, file: Path | None = None) -> None:
        command = [
            sys.executable,
            "-m",
            "hybridserve",
            "serve",
            str(file or "demo"),
            "--port",
            "0",
            *arguments,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        self.log: list[str] = []
        self.port = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if match := re.search(r"http://(?:127\.0\.0\.1|0\.0\.0\.0):(\d+)", line):
                self.port = int(match[1])

    def wait_listening(self) -> None:
        assert wait_until(lambda: self.port != 0 or self.process.poll() is not None, 60), self.log
        assert self.port, self.log

    def wait_ready(self) -> None:
        self.wait_listening()
        assert wait_until(lambda: self.get("/health/ready")[0] == 200 or self.process.poll() is not None, 90)
        assert self.process.poll() is None, self.log

    @property
    def engine_pid(self) -> int:
        """Of the engine's process; another child may be the one that compiles grammars."""
        children = psutil.Process(self.process.pid).children()
        if len(children) > 1:
            children = [
                child for child in children if any("engine_process" in part for part in child.cmdline())
            ]
        (engine,) = children
        return engine.pid

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"connection": "close", **headers})
        return connection.getresponse()

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        try:
            response = self.request("GET", path, **headers)
            return response.status, response.read()
        except OSError:
            return 0, b""

    def series(self, **headers: str) -> dict[str, float]:
        """What /metrics shows: `name{label="value"}` -> value."""
        status, page = self.get("/metrics", **headers)
        assert status == 200
        lines = [line for line in page.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def wait_idle(self, seconds: float = 30, **headers: str) -> None:
        """Until nothing runs, waits or holds memory."""
        names = [f"hybridserve_{name}" for name in IDLE_GAUGES]

        def busy() -> dict[str, float]:
            series = self.series(**headers)
            return {name: series[name] for name in names if series[name]}

        assert wait_until(lambda: not busy(), seconds), busy()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        response = self.request("POST", path, body, **headers)
        return response.status, json.loads(response.read())

    def wait_exit(self, seconds: float = 30) -> int:
        status = self.process.wait(seconds)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@contextlib.contextmanager
def server(*arguments: str, ready: bool = True, file: Path | None = None) -> Iterator[Server]:
    one = Server(*arguments, file=file)
    try:
        if ready:
            one.wait_ready()
        yield one
    finally:
        one.process.kill()
        one.wait_exit()
