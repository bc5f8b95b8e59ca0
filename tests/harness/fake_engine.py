"""An `AsyncLLM` whose engine is a script: no process, no model, no time. All else is the real thing: prompts
are read, messages encoded, stop strings found, streams fed.

`FakeEngine(reply=...)` says what is generated; `hold` and `go_on` stop and start its steps, `die` ends it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from hybridserve.core.request import FinishReason
from hybridserve.core.slabs import SlabKind
from hybridserve.engine.messages import (
    AdapterInfo,
    AdapterState,
    AdapterView,
    EngineRequest,
    EngineView,
    RequestMetrics,
    RequestView,
    SequenceOutput,
    TokenLogprobs,
)
from hybridserve.frontend import protocol
from hybridserve.frontend.async_engine import AsyncLLM
from hybridserve.frontend.errors import EngineDead
from hybridserve.lora.report import LoadReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hybridserve.frontend.client import OnEnd, OnMessage
    from hybridserve.frontend.process import EngineProcess

    Reply = Callable[[EngineRequest], Sequence[Sequence[int]]]

MAX_MODEL_LEN = 2048
VOCAB_SIZE = 4096


class FakeEngine(AsyncLLM):
    """`reply` gives the token ids of each continuation of a request, which ends with "stop" where they are
    fewer than its max_tokens; by default they are those of the prompt, over and over. A step brings one token
    to each sequence, and takes `step_seconds`. `adapters`: the names that may be chosen.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        reply: Reply | None = None,
        step_seconds: float = 0.0,
        adapters: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.fake = FakeProcess(reply or _repeat, step_seconds, adapters)

    def _make_process(self, on_message: OnMessage, on_end: OnEnd) -> EngineProcess:
        self.fake.on_message, self.fake.on_end = on_message, on_end
        return cast("EngineProcess", self.fake)

    def hold(self) -> None:
        """No step from now on; messages are still answered."""
        self.fake.may_step.clear()

    def go_on(self) -> None:
        self.fake.may_step.set()

    def die(self, reason: str = "the engine's process was ended by SIGKILL", details: str = "") -> None:
        self.fake.end(EngineDead(reason, details))


def _repeat(request: EngineRequest) -> list[list[int]]:
    length, max_tokens = len(request.prompt_ids), request.params.max_tokens
    ids = (request.prompt_ids * (max_tokens // length + 1))[:max_tokens]
    return [ids for _ in range(request.params.n)]


class FakeProcess:
    """Speaks `frontend.protocol`, as `EngineProcess` does with a real engine at its other end."""

    def __init__(self, reply: Reply, step_seconds: float, adapters: Sequence[str]) -> None:
        self.pid = None
        self.beat_seconds = 1.0
        self.received: list[protocol.ToEngine] = []
        self.adapters = dict.fromkeys(adapters, "")
        self.stats: dict[str, Any] = {"num_steps": 0, "num_generated_tokens": 0, "num_waiting": 0}
        self.refuse_adapters = ""
        """A reason to refuse whatever is to be loaded."""
        self.on_message: OnMessage
        self.on_end: OnEnd
        self.may_step = asyncio.Event()
        self.may_step.set()
        self._reply = reply
        self._pause = step_seconds
        self._live: dict[tuple[str, int], tuple[EngineRequest, list[int]]] = {}
        self._started: dict[str, float] = {}
        self._work = asyncio.Event()
        self._has_ended = False
        self._stepping: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._stepping = asyncio.create_task(self._step_for_ever())

    def kill(self, reason: str) -> None:
        self.end(EngineDead(reason))

    def end(self, error: EngineDead) -> None:
        if not self._has_ended:
            self._has_ended = True
            if self._stepping is not None:
                self._stepping.cancel()
            self.on_end(error, False)

    def send(self, payload: bytes) -> None:
        if self._has_ended:
            return
        message = protocol.decode(payload, protocol.ToEngine)
        self.received.append(message)
        match message:
            case protocol.Start():
                for name in ("import", "plan", "load"):
                    self._say(protocol.Phase(name))
                    self._say(protocol.Phase(name, 0.0))
                plan = {"model": "fake", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 256}
                self._say(protocol.Ready(plan, "model  fake", MAX_MODEL_LEN, VOCAB_SIZE))
            case protocol.Add(request):
                self._add(request)
            case protocol.Abort(request_id, index):
                for key in [key for key in self._live if key[0] == request_id and index in (None, key[1])]:
                    request, _ = self._live.pop(key)
                    last = protocol.Outputs([self._last(request, key[1], FinishReason.ABORT, [])])
                    asyncio.get_running_loop().call_soon(self._say, last)  # as from a process: not at once
            case protocol.Close():
                self.end(EngineDead("closed"))
            case _:
                self._answer(message)

    def _say(self, message: protocol.FromEngine) -> None:
        self.on_message(protocol.decode(protocol.encode(message), protocol.FromEngine))

    def _add(self, request: EngineRequest) -> None:
        if request.adapter is not None and request.adapter not in self.adapters:
            reason = f"adapter: {request.adapter!r} is unknown; there is {', '.join(self.adapters)}"
            self._say(protocol.Admitted([], [(request.request_id, reason)]))
            return
        self._say(protocol.Admitted([request.request_id], []))
        self._started[request.request_id] = time.monotonic()
        for index, token_ids in enumerate(self._reply(request)):
            self._live[request.request_id, index] = (request, list(token_ids)[: request.params.max_tokens])
        self._work.set()

    async def _step_for_ever(self) -> None:
        scored: set[str] = set()
        while True:
            await self._work.wait()
            await self.may_step.wait()
            await asyncio.sleep(self._pause)
            outputs = []
            for key, (request, token_ids) in list(self._live.items()):
                if request.params.prompt_logprobs is not None and request.request_id not in scored:
                    scored.add(request.request_id)
                    prompt = [
                        _scores(each, request.params.prompt_logprobs) for each in request.prompt_ids[1:]
                    ]
                    outputs.append(
                        SequenceOutput(request_id=key[0], index=0, token_ids=[], prompt_logprobs=prompt)
                    )
                token_id, rest = token_ids[:1], token_ids[1:]
                self.stats["num_generated_tokens"] += len(token_id)
                if rest:
                    self._live[key] = (request, rest)
                    outputs.append(
                        SequenceOutput(
                            request_id=key[0],
                            index=key[1],
                            token_ids=token_id,
                            logprobs=_drawn(request, token_id),
                        )
                    )
                    continue
                del self._live[key]
                is_short = len(self._reply(request)[key[1]]) < request.params.max_tokens
                reason = FinishReason.STOP if is_short else FinishReason.LENGTH
                outputs.append(self._last(request, key[1], reason, token_id))
            self.stats["num_steps"] += 1
            if not self._live:
                self._work.clear()
            if outputs:
                self._say(protocol.Outputs(outputs))

    def _last(
        self, request: EngineRequest, index: int, reason: FinishReason, token_ids: list[int]
    ) -> SequenceOutput:
        begin, now = self._started[request.request_id], time.monotonic()
        return SequenceOutput(
            request_id=request.request_id,
            index=index,
            token_ids=token_ids,
            logprobs=_drawn(request, token_ids),
            finish_reason=reason,
            metrics=RequestMetrics(
                arrival=request.arrival,
                first_scheduled=begin,
                first_token=begin,
                finished=now,
                num_cached_tokens=0,
                num_preemptions=0,
            ),
        )

    def _answer(self, call: protocol.Call) -> None:
        value: Any = None
        try:
            match call:
                case protocol.LoadAdapter(_, name, path):
                    if self.refuse_adapters:
                        raise ValueError(self.refuse_adapters)
                    self.adapters[name] = path
                    value = _info(name, path)
                case protocol.GetStats():
                    running = {request.request_id for request, _ in self._live.values()}
                    value = {**self.stats, "num_running": len(running), "adapters": {}}
                case protocol.GetView():
                    value = self._view()
                case protocol.ListAdapters():
                    value = [_info(name, path) for name, path in sorted(self.adapters.items())]
                case _ if call.name not in self.adapters:
                    raise ValueError(f"adapter: {call.name!r} is unknown")
                case protocol.UnloadAdapter(_, name):
                    del self.adapters[name]
                    value = not any(request.adapter == name for request, _ in self._live.values())
        except ValueError as error:
            self._say(protocol.CallFailed(call.call_id, str(error), True))
        else:
            self._say(protocol.Result(call.call_id, msgspec.Raw(protocol.encode(value))))

    def _view(self) -> EngineView:
        """With a slab of KV and one of state for each sequence."""
        now, live = time.monotonic(), list(self._live.items())
        requests = [
            RequestView(
                adapter=request.adapter,
                is_running=True,
                num_prompt=len(request.prompt_ids),
                num_computed=len(request.prompt_ids),
                num_generated=request.params.max_tokens - len(rest),
                max_tokens=request.params.max_tokens,
                num_preemptions=0,
                seconds=now - self._started[name],
            )
            for (name, _), (request, rest) in live
        ]
        return EngineView(
            gauges={**self.stats, "num_running": len(live), "adapters": {}},
            slabs=bytes([SlabKind.NULL, *[SlabKind.KV, SlabKind.STATE] * len(live)]),
            requests=requests,
            adapters=[AdapterView(name=name, state=AdapterState.DEVICE, rank=8) for name in self.adapters],
        )


def _drawn(request: EngineRequest, token_ids: list[int]) -> list[TokenLogprobs] | None:
    count = request.params.logprobs
    return None if count is None else [_scores(token_id, count) for token_id in token_ids]


def _scores(token_id: int, count: int) -> TokenLogprobs:
    """The token itself is the most likely one, at log 1/2; then come its successors."""
    ids = [token_id, *((token_id + offset) % VOCAB_SIZE for offset in range(count))]
    return TokenLogprobs(ids, [-0.6931471824645996, *(-0.6931471824645996 - i for i in range(count))], 1)


def _info(name: str, path: str) -> AdapterInfo:
    return AdapterInfo(
        name=name,
        identity=f"content of {name}",
        path=Path(path),
        state=AdapterState.DEVICE,
        rank=8,
        num_bytes=1000,
        device_bytes=1000,
        num_refs=0,
        is_pinned=False,
        report=LoadReport({"layer": 1000}, {}),
    )
