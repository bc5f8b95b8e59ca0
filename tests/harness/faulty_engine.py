"""An engine's process with a core of a few lines, which starts in no time and has the fault that the
environment names. Run as `python -m tests.harness.faulty_engine FD`.

Sequences draw 0, 1, 2, ...; a step takes a few milliseconds. A fault happens in the third step, unless its
name says something else.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hybridserve.core.request import FinishReason
from hybridserve.engine.messages import EngineRequest, RequestMetrics, SequenceOutput
from hybridserve.frontend import protocol
from hybridserve.frontend.engine_process import Pulse, main
from hybridserve.frontend.protocol import Channel, encode

if TYPE_CHECKING:
    from hybridserve.engine.core import EngineCore
    from hybridserve.frontend.engine_process import Inbox

FAULT = "HYBRIDSERVE_TEST_FAULT"
MAX_MODEL_LEN = 100_000
STEP_OF_FAULT = 3
LONG_SECONDS = 3.0
FOR_EVER = 600.0


def load(channel: Channel, inbox: Inbox, begin: float) -> tuple[EngineCore, Pulse]:
    fault = os.environ.get(FAULT, "")
    start = inbox.take_start()
    channel.send(encode(protocol.Phase("load")))
    if fault == "load-mistake":
        raise ValueError("model: no such directory")
    if fault == "load-raise":
        fail()
    if fault == "load-hang":
        time.sleep(FOR_EVER)
    if fault == "load-garbage":
        os.write(int(sys.argv[1]), os.urandom(64))
    pulse = Pulse(channel, start.beat_seconds)
    channel.send(encode(protocol.Ready({}, "", MAX_MODEL_LEN, 4096)))
    return cast("EngineCore", FaultyCore(fault)), pulse


def fail() -> None:
    try:
        raise OSError("the device is gone")
    except OSError as error:
        raise RuntimeError("a step could not be computed") from error


class FaultyCore:
    def __init__(self, fault: str) -> None:
        self.adapters = SimpleNamespace(num_loading=0)
        self.num_steps = 0
        self._fault = fault
        self._live: dict[str, tuple[EngineRequest, int]] = {}
        self._outbox: list[SequenceOutput] = []

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._outbox)

    def add(self, request: EngineRequest) -> None:
        if request.adapter is not None:
            raise ValueError(f"adapter: {request.adapter!r} is unknown")
        self._live[request.request_id] = (request, 0)

    def abort(self, request_id: str, index: int | None = None) -> None:
        if self._live.pop(request_id, None):
            self._outbox.append(output(request_id, [], FinishReason.ABORT))

    def step(self) -> list[SequenceOutput]:
        self.num_steps += 1
        if self.num_steps == STEP_OF_FAULT:
            self._happen()
        time.sleep(0.002)
        outputs, self._outbox = self._outbox, []
        for request_id, (request, count) in list(self._live.items()):
            is_last = count + 1 == request.params.max_tokens
            outputs.append(output(request_id, [count % 4096], FinishReason.LENGTH if is_last else None))
            self._live[request_id] = (request, count + 1)
            if is_last:
                del self._live[request_id]
        return outputs

    def _happen(self) -> None:
        match self._fault:
            case "raise":
                fail()
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(FOR_EVER)
            case "hang-with-gil":
                ctypes.PyDLL(None).sleep(int(FOR_EVER))  # a PyDLL keeps the interpreter's lock
            case "compute":
                end = time.monotonic() + LONG_SECONDS
                while time.monotonic() < end:
                    sum(range(10_000))
            case "garbage":
                os.write(int(sys.argv[1]), os.urandom(64))
            case "child":  # one that would outlive it, as ranks might
                child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOR_EVER})"])
                with open(os.environ["HYBRIDSERVE_TEST_PID_FILE"], "w") as file:  # noqa: PTH123
                    file.write(str(child.pid))
                os._exit(3)

    def gauges(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "num_running": len(self._live)}

    def close(self) -> None:
        if self._fault == "close-hang":
            time.sleep(FOR_EVER)


def output(request_id: str, token_ids: list[int], reason: FinishReason | None) -> SequenceOutput:
    metrics = None
    if reason is not None:
        metrics = RequestMetrics(
            arrival=0.0,
            first_scheduled=None,
            first_token=None,
            finished=0.0,
            num_cached_tokens=0,
            num_preemptions=0,
        )
    return SequenceOutput(
        request_id=request_id, index=0, token_ids=token_ids, finish_reason=reason, metrics=metrics
    )


if __name__ == "__main__":
    main(load)
