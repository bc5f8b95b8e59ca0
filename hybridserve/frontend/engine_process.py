"""The engine's side: loads an engine, then does what its client asks until the client says so or is gone.

Run as `python -m hybridserve.frontend.engine_process FD`, FD being an end of a socket pair. The main thread
drives the engine core, one thread receives, one tells that the process lives. Knows no text.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hybridserve.collector import collector_rests
from hybridserve.engine.view import view_of
from hybridserve.frontend import protocol
from hybridserve.frontend.protocol import Channel, PeerGone, ProtocolError, ToEngine, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from hybridserve.engine.core import EngineCore

    Load = Callable[[Channel, "Inbox", float], tuple[EngineCore, "Pulse"]]

LOADING_SECONDS = 0.01
"""Between two looks at what the adapters' loader has brought, where nothing else is to be done."""
SIGN_OF_LIFE_SECONDS = 0.001
"""Of computing, between two beats."""
PR_SET_PDEATHSIG = 1


def main(load: Load | None = None) -> None:
    """`load` stands for `load_engine` in tests that need an engine with a fault."""
    begin = time.perf_counter()
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal or supervisor sends them to the client, too
        signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # of whoever started this, and of its children
    die_with_parent()
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    channel = Channel(sock)
    inbox = Inbox(channel)
    status, is_starting = 0, True
    try:
        core, pulse = (load or load_engine)(channel, inbox, begin)
        is_starting = False
        EngineLoop(core, channel, inbox, pulse).run()
    except PeerGone:
        pass  # nobody is there to be told
    except BaseException as error:
        status = 1
        _report(channel, error, is_value_error=is_starting and isinstance(error, ValueError))
    os._exit(status)  # at once, whatever the threads of libraries are doing


def load_engine(channel: Channel, inbox: Inbox, begin: float) -> tuple[EngineCore, Pulse]:
    """Load what `Start` says, telling of each phase; `begin` is when the process did."""
    with _phase(channel, "import", begin), collector_rests(keeps=True):
        from hybridserve.config.schema import EngineConfig
        from hybridserve.engine.alternatives import make_plan_or_suggest
        from hybridserve.engine.core import EngineCore
    start = inbox.take_start()
    config, path = EngineConfig.model_validate_json(start.config), Path(start.model_path)
    with _phase(channel, "plan"):
        plan = make_plan_or_suggest(config, path)
    with _phase(channel, "load"):
        core = EngineCore.create(config, plan, path)
        core.warm_up()
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not look at it again
    pulse = Pulse(
        channel,
        start.beat_seconds,
        computing_is_life=plan.device == "cpu",  # elsewhere a thread may spin while it waits
        steps_are_watched=config.parallel.num_ranks > 1,
    )
    channel.send(encode(protocol.Ready(plan.to_dict(), plan.table(), plan.max_model_len, plan.vocab_size)))
    return core, pulse


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it is gone, whatever it is doing."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _phase(channel: Channel, name: str, begin: float | None = None) -> Iterator[None]:
    channel.send(encode(protocol.Phase(name)))
    begin = time.perf_counter() if begin is None else begin
    yield
    channel.send(encode(protocol.Phase(name, time.perf_counter() - begin)))


def _report(channel: Channel, error: BaseException, *, is_value_error: bool) -> None:
    details = _plain("".join(traceback.format_exception(error)))
    with suppress(PeerGone):
        reason = reason_of(error, is_value_error=is_value_error)
        channel.send(encode(protocol.Failed(reason, details, is_value_error)))


def _plain(text: str) -> str:
    """As it can be sent: the name of a file may be bytes that are no text."""
    return text.encode(errors="backslashreplace").decode()


def reason_of(error: BaseException, *, is_value_error: bool) -> str:
    """What went wrong as one text, root cause last. What a user has caused says all by itself."""
    if is_value_error:
        return _plain(str(error))
    chain = [error]
    while cause := chain[-1].__cause__ or (not chain[-1].__suppress_context__ and chain[-1].__context__):
        chain.append(cause)
    shown = [f"{type(each).__name__}: {each}".removesuffix(": ") for each in chain]
    return _plain("; caused by ".join(["the engine failed: " + shown[0], *shown[1:][-1:]]))


class Inbox:
    """Messages of the client as they come. Its thread ends the process when the client is gone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: deque[ToEngine] = deque()
        self._arrived = threading.Event()
        self._error: ProtocolError | None = None
        threading.Thread(target=self._receive, name="hybridserve-inbox", daemon=True).start()

    def _receive(self) -> None:
        try:
            while True:
                for payload in self._channel.receive():
                    self._messages.append(decode(payload, ToEngine))
                    self._arrived.set()
        except PeerGone:
            os._exit(0)  # in the middle of a step, too: there is nobody to compute for
        except ProtocolError as error:
            self._error = error
            self._arrived.set()

    def take(self, wait_seconds: float | None) -> list[ToEngine]:
        """What has come, after waiting for it so long at most (None: for ever). ProtocolError, once all
        before it was taken, for what is not a message."""
        if wait_seconds != 0:
            self._arrived.wait(wait_seconds)
        self._arrived.clear()  # before looking: what comes from now on sets it again
        taken = []
        while self._messages:
            taken.append(self._messages.popleft())
        if not taken and self._error is not None:
            raise self._error
        return taken

    def take_start(self) -> protocol.Start:
        while not (taken := self.take(None)):
            pass
        if not isinstance(taken[0], protocol.Start):
            raise ProtocolError(f"the first message is a {type(taken[0]).__name__}")
        self._messages.extendleft(reversed(taken[1:]))
        self._arrived.set()
        return taken[0]


class Pulse:
    """Tells the client in time that this process lives, and whether its loop gets on.

    The loop gets on where it turns or its thread computes: a step may be long, but one that takes no time of
    a processor is stuck.
    """

    def __init__(
        self,
        channel: Channel,
        seconds: float,
        *,
        computing_is_life: bool = True,
        steps_are_watched: bool = False,
    ) -> None:
        """`computing_is_life`: a thread that computes gets on. `steps_are_watched`: the executor has a limit
        of its own for a step, in which it may wait for other processes."""
        self._channel = channel
        self._seconds = seconds
        self._computing_is_life = computing_is_life
        self._steps_are_watched = steps_are_watched
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._num_turns = 0
        self._busy_since: float | None = None
        threading.Thread(target=self._beat, name="hybridserve-pulse", daemon=True).start()

    def turn(self) -> None:
        """The loop begins to work off what there is."""
        self._num_turns += 1
        self._busy_since = time.monotonic()

    def rest(self) -> None:
        """The loop waits to be asked."""
        self._busy_since = None

    def _beat(self) -> None:
        last_turn, last_cpu, alive = -1, 0.0, time.monotonic()
        while True:
            now, since, num_turns = time.monotonic(), self._busy_since, self._num_turns
            cpu = time.clock_gettime(self._clock)
            computes = self._computing_is_life and cpu - last_cpu >= SIGN_OF_LIFE_SECONDS
            if since is None or num_turns != last_turn or computes or self._steps_are_watched:
                last_turn, last_cpu, alive = num_turns, cpu, now
            try:
                self._channel.send(encode(protocol.Beat(0.0 if since is None else now - since, now - alive)))
            except PeerGone:
                return  # the inbox's thread ends the process
            time.sleep(self._seconds)


class EngineLoop:
    """Between the client's messages and the engine core: takes what has come, runs a step, sends what it
    brought."""

    def __init__(self, core: EngineCore, channel: Channel, inbox: Inbox, pulse: Pulse) -> None:
        self._core = core
        self._channel = channel
        self._inbox = inbox
        self._pulse = pulse
        self._loads: list[tuple[protocol.LoadAdapter, Future[Any]]] = []
        self._accepted: list[str] = []
        self._refused: list[tuple[str, str]] = []
        self._is_closing = False

    def run(self) -> None:
        """Until the client says `Close`. What the engine raises ends it: a step that failed once would fail
        again."""
        try:
            while not self._is_closing:
                self._turn()
        finally:
            self._core.close()

    def _turn(self) -> None:
        patience = self._patience()
        if patience is None:
            self._pulse.rest()
        messages = self._inbox.take(patience)
        self._pulse.turn()
        for message in messages:
            self._handle(message)
        self._send_admitted()
        if self._core.has_work or self._is_loading:
            if outputs := self._core.step():
                self._channel.send(encode(protocol.Outputs(outputs)))
            self._finish_loads()

    @property
    def _is_loading(self) -> bool:
        return bool(self._loads or self._core.adapters.num_loading)

    def _patience(self) -> float | None:
        if self._core.has_work:
            return 0
        return LOADING_SECONDS if self._is_loading else None

    def _handle(self, message: ToEngine) -> None:
        match message:
            case protocol.Add(request):
                try:
                    self._core.add(request)
                except ValueError as error:
                    self._refused.append((request.request_id, str(error)))
                else:
                    self._accepted.append(request.request_id)
            case protocol.Abort(request_id, index):
                self._core.abort(request_id, index)
            case protocol.Close():
                self._is_closing = True
            case protocol.Start():
                raise ProtocolError("a second Start")
            case _:
                self._call(message)

    def _send_admitted(self) -> None:
        """Before the step, so that nobody waits for one to hear of a mistake."""
        if self._accepted or self._refused:
            self._channel.send(encode(protocol.Admitted(self._accepted, self._refused)))
            self._accepted, self._refused = [], []

    def _call(self, call: protocol.Call) -> None:
        adapters = self._core.adapters
        value: Any = None
        try:
            match call:
                case protocol.LoadAdapter(_, name, path):
                    self._loads.append((call, adapters.load(name, path)))
                    return
                case protocol.UnloadAdapter(_, name):
                    value = adapters.unload(name)
                case protocol.PinAdapter(_, name):
                    adapters.pin(name)
                case protocol.UnpinAdapter(_, name):
                    adapters.unpin(name)
                case protocol.ListAdapters():
                    value = adapters.infos()
                case protocol.GetStats():
                    value = self._core.gauges()
                case protocol.GetView():
                    value = view_of(self._core)
        except Exception as error:
            self._answer_failure(call, error)
        else:
            self._answer(call, value)

    def _finish_loads(self) -> None:
        for load in [each for each in self._loads if each[1].done()]:
            self._loads.remove(load)
            call, future = load
            try:
                future.result()
                info = self._core.adapters.info(call.name)
            except Exception as error:
                self._answer_failure(call, error)
            else:
                self._answer(call, info)

    def _answer(self, call: protocol.Call, value: object) -> None:
        self._channel.send(encode(protocol.Result(call.call_id, msgspec.Raw(encode(value)))))

    def _answer_failure(self, call: protocol.Call, error: Exception) -> None:
        is_value_error = isinstance(error, ValueError)
        reason = reason_of(error, is_value_error=is_value_error)
        self._channel.send(encode(protocol.CallFailed(call.call_id, reason, is_value_error)))


if __name__ == "__main__":
    main()
