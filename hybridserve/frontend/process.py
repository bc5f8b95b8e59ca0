"""The engine's process as its client sees it: started, spoken to, watched, ended.

Knows processes, threads and bytes; what the messages mean is for their receiver. Two daemon threads belong to
it: one starts the process, receives and watches, one sends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from hybridserve.frontend.errors import EngineDead
from hybridserve.frontend.protocol import (
    Beat,
    Channel,
    Failed,
    FromEngine,
    PeerGone,
    ProtocolError,
    Ready,
    decode,
)

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_SECONDS = 5.0
"""For a process that has hung up to end by itself."""
MAX_BEAT_SECONDS = 1.0
LEFT_TO_CLIENT = (signal.SIGINT, signal.SIGTERM)
"""Signals that a terminal or a supervisor sends to the engine's process too."""


class EngineProcess:
    """One process, once, that runs the module `entry`.

    `on_message` is called with each message of the engine but `Failed`, `on_end` once, last, with what ended
    it and whether that was a user's mistake; both in the receiving thread. If `on_message` raises, nobody is
    there any more, and the process is killed; so is one that was ready, and that for `heartbeat_seconds` has
    said nothing or has not got on.
    """

    def __init__(
        self,
        entry: str,
        heartbeat_seconds: float,
        on_message: Callable[[FromEngine], None],
        on_end: Callable[[EngineDead, bool], None],
    ) -> None:
        self.beat_seconds = min(heartbeat_seconds / 4, MAX_BEAT_SECONDS)
        self.pid: int | None = None
        self._entry = entry
        self._heartbeat_seconds = heartbeat_seconds
        self._on_message = on_message
        self._on_end = on_end
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._failure: Failed | None = None
        self._is_ready = False
        self._kill_reason = ""
        self._is_reaped = False
        """From then on its number may be another one's."""
        self._reaping = threading.Lock()

    def start(self) -> None:
        # The kernel kills the process when the thread that started it ends (`die_with_parent`), so that is a
        # thread that lives for as long as the process.
        threading.Thread(target=self._run, name="hybridserve-engine-receiver", daemon=True).start()

    def send(self, payload: bytes) -> None:
        """Send what `protocol.encode` has made. Never blocks. What a process that has ended would get is
        lost."""
        self._outbox.put(payload)

    def kill(self, reason: str) -> None:
        """End it now; `on_end` gets the reason."""
        self._kill_reason = self._kill_reason or reason
        with self._reaping:
            if self.pid is not None and not self._is_reaped:
                _kill_group(self.pid)

    def _run(self) -> None:
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        sender = threading.Thread(target=self._send_all, args=(channel,), name="hybridserve-engine-sender")
        sender.daemon = True
        try:
            with theirs:
                process = self._spawn(theirs)
        except OSError as error:
            channel.close()
            self._on_end(EngineDead(f"the engine's process could not be started: {error}"), False)
            return
        self.pid = process.pid
        sender.start()
        try:
            self._receive_all(channel, process)
        except ProtocolError as error:
            self._kill_reason = self._kill_reason or f"the engine's process was ended: {error}"
        except Exception as error:  # of on_message
            self._kill_reason = self._kill_reason or f"the engine's output could not be taken: {error}"
        channel.hang_up()
        self._end(process)
        self._outbox.put(None)
        sender.join()
        channel.close()
        self._on_end(*self._reason(process.returncode))

    def _spawn(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        """In a process group of its own: Ctrl-C in a terminal is for the client to judge. Signals are blocked
        in this thread, and so in the process from its first moment until it ignores them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_CLIENT)
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 - text, as the others
        return subprocess.Popen(
            [sys.executable, "-P", "-m", self._entry, str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )

    def _send_all(self, channel: Channel) -> None:
        with contextlib.suppress(PeerGone):  # the receiver sees the end, too
            while (payload := self._outbox.get()) is not None:
                channel.send(payload)

    def _receive_all(self, channel: Channel, process: subprocess.Popen[bytes]) -> None:
        """Until the process hangs up, dies or hangs."""
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        silent_seconds = 0.0  # in pieces that were waited for: while this process is stopped, none goes by
        while not self._kill_reason:
            if not poll.poll(self.beat_seconds * 1000):
                silent_seconds += self.beat_seconds
                if _has_exited(process):
                    return
                if self._is_ready and silent_seconds >= self._heartbeat_seconds:
                    self._kill_reason = f"the engine's process has not answered for {silent_seconds:.1f} s"
                continue
            silent_seconds = 0.0
            try:
                payloads = channel.receive()
            except PeerGone:
                return
            for payload in payloads:
                self._take(decode(payload, FromEngine))

    def _take(self, message: FromEngine) -> None:
        match message:
            case Beat(step_seconds, stalled_seconds):
                if stalled_seconds >= self._heartbeat_seconds:
                    self._kill_reason = f"the engine has been stuck in a step for {step_seconds:.1f} s"
            case Failed():
                self._failure = message
                return
            case Ready():
                self._is_ready = True
        self._on_message(message)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Leave nothing of its group running."""
        deadline = time.monotonic() + (0 if self._kill_reason else EXIT_SECONDS)
        while not _has_exited(process) and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._reaping:
            _kill_group(process.pid)
            process.wait()
            self._is_reaped = True

    def _reason(self, status: int) -> tuple[EngineDead, bool]:
        if self._failure is not None:
            failure = self._failure
            return EngineDead(failure.reason, failure.details), failure.is_value_error
        if self._kill_reason:
            return EngineDead(self._kill_reason), False
        if status < 0:
            name = signal.Signals(-status).name
            hint = "; the machine may have run out of memory" if status == -signal.SIGKILL else ""
            return EngineDead(f"the engine's process was ended by {name}{hint}"), False
        return EngineDead(f"the engine's process has exited with status {status}"), False


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _has_exited(process: subprocess.Popen[bytes]) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
