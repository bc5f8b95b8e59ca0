"""An engine of this program as a target: the `AsyncLLM` of its configuration, with no HTTP between.

Knows the asyncio API; the engine computes in a process of its own, so no torch is imported here.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self, cast

from hybridserve.bench.target import Arrival, RequestFailed, TargetError, Usage, is_chat
from hybridserve.core.request import FinishReason, SamplingParams
from hybridserve.frontend.errors import EngineUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from hybridserve.bench.target import TargetRequest
    from hybridserve.frontend.async_engine import AsyncLLM


class EngineTarget:
    """`engine` is one that was not started. `on_phase`: see `AsyncLLM.start`."""

    def __init__(self, engine: AsyncLLM, on_phase: Callable[[str, float | None], None] | None = None) -> None:
        self._engine = engine
        self._on_phase = on_phase

    @property
    def name(self) -> str:
        return self._engine.config.served_name or self._engine.config.model

    @property
    def vocab_size(self) -> int | None:
        return self._engine.vocab_size

    @property
    def max_model_len(self) -> int | None:
        return self._engine.max_model_len

    @property
    def counts(self) -> str:
        return "told by the engine"

    @property
    def plan_table(self) -> str:
        return self._engine.plan_table

    async def __aenter__(self) -> Self:
        try:
            await self._engine.start(on_phase=self._on_phase)
            await self._engine.wait_ready()
        except BaseException:
            await self._engine.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._engine.close()

    async def adapters(self) -> list[str]:
        return [info.name for info in await self._engine.list_adapters()]

    async def rehearse(self, request: TargetRequest, *, needs_ids: bool) -> None:
        try:
            async with contextlib.aclosing(self.stream(request)) as stream:
                async for _ in stream:
                    pass
        except RequestFailed as error:
            raise TargetError(error.detail) from None

    async def stream(self, request: TargetRequest) -> AsyncGenerator[Arrival]:
        engine = self._engine
        try:
            if is_chat(request.prompt):
                prompt: str | list[int] = await engine.encode_chat(request.prompt)
            else:
                prompt = cast("str | list[int]", request.prompt)
            params = SamplingParams(
                max_tokens=self._max_tokens(request, prompt),
                ignore_eos=request.ignore_eos,
                **request.sampling,
            )
            stream = await engine.submit(prompt, params, adapter=request.adapter)
        except EngineUnavailable as error:
            raise RequestFailed("engine", str(error)) from None
        except ValueError as error:
            raise RequestFailed("refused", str(error)) from None
        num_output = 0
        try:
            async with contextlib.aclosing(stream):
                async for deltas in stream:
                    arrival = Arrival()
                    for delta in deltas:
                        arrival.text += delta.text
                        arrival.token_ids += delta.token_ids
                        arrival.num_events += bool(delta.text or delta.token_ids)
                        arrival.finish_reason = delta.finish_reason or arrival.finish_reason
                        if delta.finish_reason == FinishReason.ABORT:
                            raise RequestFailed("aborted", str(delta.stop_reason or ""))
                        if delta.metrics is not None:
                            cached = delta.metrics.num_cached_tokens
                            arrival.usage = Usage(len(stream.prompt_token_ids), 0, cached)
                    arrival.num_tokens = len(arrival.token_ids)
                    num_output += arrival.num_tokens
                    if arrival.usage is not None:
                        arrival.usage = arrival.usage._replace(num_output=num_output)
                    yield arrival
        except EngineUnavailable as error:
            raise RequestFailed("engine", str(error)) from None

    def _max_tokens(self, request: TargetRequest, prompt: str | list[int]) -> int:
        """None: as many as there is room for; after a prompt of text, whose length is not known yet, the
        default of SamplingParams."""
        if request.max_tokens is not None:
            return request.max_tokens
        if isinstance(prompt, str):
            return SamplingParams().max_tokens
        return max(1, self._engine.max_model_len - len(prompt))

    def describe(self) -> dict[str, Any]:
        return {"model": self.name, "plan": self._engine.plan}
