"""The engine's loop: schedule, build, execute, update, emit. Knows requests and steps; knows no text and no
tensors."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridserve.core.request import Request
from hybridserve.core.scheduler import Scheduler
from hybridserve.engine.executor import Executor, LocalExecutor
from hybridserve.engine.input_builder import BuiltStep, InputBuilder
from hybridserve.engine.messages import EngineRequest, RequestMetrics, SequenceOutput, TokenLogprobs
from hybridserve.models.config import eos_token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hybridserve.config.schema import EngineConfig
    from hybridserve.core.step import ScheduledStep
    from hybridserve.engine.model_runner import StepOutput
    from hybridserve.engine.planner import EnginePlan

NOT_FINITE = "the model's logits were not finite"
"""`stop_reason` of a request that was aborted because its row of logits held NaN or infinity."""


@dataclass(slots=True)
class _Live:
    """A sequence that has not finished, and when things happened to it (monotonic seconds)."""

    request: Request
    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    num_prompt_scored: int = 0


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and where the time of steps went (seconds)."""

    num_steps: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("schedule", "build", "forward", "sample", "update"), 0.0)
    )


class EngineCore:
    """One scheduler, one builder, one executor. Not thread-safe: one caller drives it."""

    def __init__(
        self, scheduler: Scheduler, builder: InputBuilder, executor: Executor, vocab_size: int
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.stats = EngineStats()
        self._vocab_size = vocab_size
        self._builder = builder
        self._in_flight: deque[tuple[ScheduledStep, BuiltStep]] = deque()
        self._live: dict[str, _Live] = {}
        self._outbox: list[SequenceOutput] = []

    @property
    def has_work(self) -> bool:
        return bool(self._outbox or self._in_flight or self.scheduler.has_work)

    @classmethod
    def create(
        cls,
        config: EngineConfig,
        plan: EnginePlan,
        model_path: Path,
        *,
        executor: Executor | None = None,
        buckets: Sequence[int] = (),
    ) -> EngineCore:
        """Load the model and set up everything that the plan says.

        `executor` is one that has loaded the model already; `buckets` pads steps (see `InputBuilder`).
        """
        eos = eos_token_ids(model_path)
        scheduler = Scheduler(
            plan.layout,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            policy=config.scheduler.policy,
            eos_token_ids=eos,
            check_integrity=config.cache.check_integrity,
        )
        builder = InputBuilder(
            block_size=plan.layout.block_size, seed=config.seed, eos_token_ids=eos, buckets=buckets
        )
        return cls(scheduler, builder, executor or LocalExecutor(model_path, plan), plan.vocab_size)

    def check(self, request: EngineRequest) -> None:
        """ValueError, naming the field, for a request that makes no sense to this model or could never be
        served."""
        if request.adapter is not None:
            raise ValueError(
                f"adapter: {request.adapter!r} is unknown; this engine serves the base model only"
            )
        params, vocab_size = request.params, self._vocab_size
        for name, token_ids in (
            ("prompt", request.prompt_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(
                        f"{name}: token id {token_id} is not in the vocabulary (0 to {vocab_size - 1})"
                    )
        self.scheduler.check(_as_request(request))

    def add(self, request: EngineRequest) -> None:
        """Queue a request that `check` accepts; ValueError for any other, and nothing changes."""
        self.check(request)
        sequence = _as_request(request)
        self.scheduler.add(sequence)
        self._live[sequence.id] = _Live(sequence, request.arrival)
        self.stats.num_requests += 1

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop one continuation of a request, or all of them. Unknown or finished ones are left alone."""
        for live in list(self._live.values()):
            request = live.request
            if request_id in (request.id, request.parent_id) and index in (None, request.index):
                self._abort(request.id, None)

    def step(self) -> list[SequenceOutput]:
        """Start as many steps as may be in flight, finish the oldest; returns what sequences gained.

        Whatever is raised on the way (by the model, or by Ctrl-C) goes on to the caller, and the engine stays
        usable: what was in flight is dropped, and its sequences compute again.
        """
        try:
            while len(self._in_flight) < self.executor.max_in_flight and self._start_step():
                pass
            if self._in_flight:
                self._finish_step()
        except BaseException:
            self._restart()
            raise
        outputs, self._outbox = self._outbox, []
        return outputs

    def gauges(self) -> dict[str, float]:
        """Counters since the start and gauges of this moment."""
        stats, scheduler = self.stats, self.scheduler
        return {
            "num_steps": stats.num_steps,
            "num_requests": stats.num_requests,
            "num_finished": stats.num_finished,
            "num_computed_tokens": stats.num_computed_tokens,
            "num_generated_tokens": stats.num_generated_tokens,
            "num_preemptions": scheduler.counters.num_preemptions,
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            **{f"{phase}_seconds": seconds for phase, seconds in stats.seconds.items()},
            **{f"cache_{name}": value for name, value in scheduler.cache.usage()._asdict().items()},
            "cache_utilisation": scheduler.cache.usage().utilisation,
        }

    def close(self) -> None:
        self.executor.close()

    def _start_step(self) -> bool:
        begin = time.perf_counter()
        step = self.scheduler.schedule()
        scheduled = time.perf_counter()
        self.stats.seconds["schedule"] += scheduled - begin
        if step is None:
            return False
        built = self._builder.build(step, self.scheduler.requests)
        self.stats.seconds["build"] += time.perf_counter() - scheduled
        now = time.monotonic()
        for seq in step.sequences:
            self.stats.num_computed_tokens += seq.length
            live = self._live[seq.request_id]
            live.first_scheduled = live.first_scheduled or now
            for request_id in seq.samples:
                if request_id not in self._live:  # a continuation that forks here
                    child = self.scheduler.requests[request_id]
                    self._live[request_id] = _Live(child, live.arrival, live.first_scheduled)
        self.executor.submit(built.input)
        self._in_flight.append((step, built))
        self.stats.num_steps += 1
        return True

    def _finish_step(self) -> None:
        result = self.executor.collect()
        begin = time.perf_counter()
        step, built = self._in_flight.popleft()
        if result.step_id != step.step_id:
            raise RuntimeError(f"executor returned step {result.step_id}, expected {step.step_id}")
        sampled = dict(zip(built.sample_ids, result.token_ids, strict=True))
        for request_id, scored in self._prompt_logprobs(built, result).items():
            live = self._live[request_id]
            live.num_prompt_scored += len(scored)
            self._emit(live.request, prompt_logprobs=scored)
        for request_id, token_id in sampled.items():
            if token_id < 0:
                self._abort(request_id, NOT_FINITE)
        logprobs = self._logprobs(built, result)
        now = time.monotonic()
        for event in self.scheduler.update(step.step_id, sampled):
            live = self._live[event.request_id]
            if event.token_id is None:
                self._emit(live.request)
                continue
            live.first_token = live.first_token or now
            self.stats.num_generated_tokens += 1
            scored_token = logprobs.get(event.request_id)
            self._emit(live.request, [event.token_id], None if scored_token is None else [scored_token])
        self.stats.seconds["forward"] += result.forward_seconds
        self.stats.seconds["sample"] += result.sample_seconds
        self.stats.seconds["update"] += time.perf_counter() - begin

    def _restart(self) -> None:
        self._in_flight.clear()
        self.executor.reset()
        for request_id in self.scheduler.restart():
            self._live.pop(request_id, None)
        self._builder.reset({name: live.num_prompt_scored for name, live in self._live.items()})

    def _abort(self, request_id: str, reason: str | None) -> None:
        for event in self.scheduler.abort(request_id, stop_reason=reason):
            self._emit(self._live[event.request_id].request)

    def _emit(
        self,
        request: Request,
        token_ids: Sequence[int] = (),
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        metrics = None
        if request.finish_reason is not None:
            live = self._live.pop(request.id)
            self.stats.num_finished += 1
            metrics = RequestMetrics(
                arrival=live.arrival,
                first_scheduled=live.first_scheduled,
                first_token=live.first_token,
                finished=time.monotonic(),
                num_cached_tokens=request.num_cached,
                num_preemptions=request.num_preemptions,
            )
        self._outbox.append(
            SequenceOutput(
                request_id=request.parent_id or request.id,
                index=request.index,
                token_ids=list(token_ids),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                metrics=metrics,
            )
        )

    def _logprobs(self, built: BuiltStep, result: StepOutput) -> dict[str, TokenLogprobs]:
        scored = result.logprobs
        if scored is None:
            return {}
        found = {}
        for place, row in enumerate(scored.rows):
            live = self._live.get(built.sample_ids[row])
            if live is not None and live.request.params.logprobs is not None:
                found[live.request.id] = scored.at(place, result.token_ids[row], live.request.params.logprobs)
        return found

    def _prompt_logprobs(self, built: BuiltStep, result: StepOutput) -> dict[str, list[TokenLogprobs]]:
        scored, wanted = result.prompt_logprobs, built.input.prompt_logprobs
        if scored is None or wanted is None:
            return {}
        found = {}
        place = 0
        for request_id, count in built.prompt_spans:
            live = self._live.get(request_id)
            if live is not None and live.request.params.prompt_logprobs is not None:
                num_top = live.request.params.prompt_logprobs
                found[request_id] = [
                    scored.at(at, int(wanted.targets[at]), num_top) for at in range(place, place + count)
                ]
            place += count
        return found


def _as_request(request: EngineRequest) -> Request:
    return Request(
        id=request.request_id,
        prompt_ids=request.prompt_ids,
        params=request.params,
        priority=request.priority,
        adapter=request.adapter,
    )
