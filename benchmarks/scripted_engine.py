"""An engine whose tokens cost nothing, for what the server alone can do.

    python benchmarks/scripted_engine.py serve demo

is `hybridserve serve demo` with it. Each sequence draws the same tokens over and over; a step gives one to
each, HYBRIDSERVE_SCRIPTED_STEPS times a second (0: without a pause).
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hybridserve.core.request import FinishReason
from hybridserve.engine.messages import RequestMetrics, SequenceOutput
from hybridserve.frontend import protocol
from hybridserve.frontend.engine_process import Pulse, main

if TYPE_CHECKING:
    from hybridserve.engine.core import EngineCore
    from hybridserve.engine.messages import EngineRequest
    from hybridserve.frontend.engine_process import Inbox
    from hybridserve.frontend.protocol import Channel

MAX_MODEL_LEN = 10_000_000
VOCAB_SIZE = 4096
FIRST_TOKEN, NUM_TOKENS = 300, 3000
STEPS = "HYBRIDSERVE_SCRIPTED_STEPS"


class ScriptedCore:
    """The part of `EngineCore` that the engine's loop uses."""

    def __init__(self, steps_a_second: float) -> None:
        self.adapters = SimpleNamespace(num_loading=0)
        self._pause = 1 / steps_a_second if steps_a_second else 0.0
        self._next = 0.0
        self._live: dict[str, tuple[EngineRequest, int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, request: EngineRequest) -> None:
        self._live[request.request_id] = (request, 0)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._live.pop(request_id, None)

    def step(self) -> list[SequenceOutput]:
        now = time.monotonic()
        self._next = max(self._next + self._pause, now)
        time.sleep(self._next - now)
        outputs = []
        for request_id, (request, count) in list(self._live.items()):
            token_id = FIRST_TOKEN + count % NUM_TOKENS
            is_last = count + 1 == request.params.max_tokens
            self._live[request_id] = (request, count + 1)
            if is_last:
                del self._live[request_id]
            output = SequenceOutput(
                request_id=request_id,
                index=0,
                token_ids=[token_id],
                finish_reason=FinishReason.LENGTH if is_last else None,
                metrics=_metrics(request, now) if is_last else None,
            )
            outputs.append(output)
        return outputs

    def gauges(self) -> dict[str, Any]:
        return {"num_steps": 0, "num_running": len(self._live)}

    def close(self) -> None:
        pass


def _metrics(request: EngineRequest, now: float) -> RequestMetrics:
    return RequestMetrics(
        arrival=request.arrival,
        first_scheduled=now,
        first_token=now,
        finished=now,
        num_cached_tokens=0,
        num_preemptions=0,
    )


def load(channel: Channel, inbox: Inbox, begin: float) -> tuple[EngineCore, Pulse]:
    start = inbox.take_start()
    pulse = Pulse(channel, start.beat_seconds)
    channel.send(protocol.encode(protocol.Ready({}, "scripted", MAX_MODEL_LEN, VOCAB_SIZE)))
    return cast("EngineCore", ScriptedCore(float(os.environ.get(STEPS, "0")))), pulse


def serve(arguments: list[str]) -> None:
    """`hybridserve serve` with this engine."""
    from hybridserve.cli import main as command
    from hybridserve.frontend.async_engine import AsyncLLM

    AsyncLLM._entry = "scripted_engine"
    command(["serve", *arguments])


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2:])
    else:
        main(load)
