"""The engine's loop: schedule, build, execute, update, emit. Knows requests and steps; knows no text and no
tensors."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from hybridserve.core.limits import check_vocabulary
from hybridserve.core.request import FinishReason, Request, RequestStatus
from hybridserve.distributed.failure import RankFailure
from hybridserve.engine import scores
from hybridserve.engine.adapters import EngineAdapters, create_store
from hybridserve.engine.executors import create_executor
from hybridserve.engine.grammars import Grammars
from hybridserve.engine.makers import make_builder, make_scheduler
from hybridserve.engine.messages import EngineRequest, RequestMetrics, SequenceOutput, TokenLogprobs
from hybridserve.engine.stats import EngineStats
from hybridserve.engine.token_masks import TokenMasks
from hybridserve.models.config import eos_token_ids
from hybridserve.models.hub import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from hybridserve.config.schema import EngineConfig
    from hybridserve.core.scheduler import Scheduler
    from hybridserve.core.step import ScheduledStep
    from hybridserve.engine.executor import Executor
    from hybridserve.engine.input_builder import BuiltStep, InputBuilder
    from hybridserve.engine.planner import EnginePlan

T = TypeVar("T")

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
    family: set[str] = field(default_factory=set)
    """Ids of the live sequences of one request: a set that they share."""


class EngineCore:
    """One scheduler, one builder, one executor. Not thread-safe: one caller drives it."""

    def __init__(
        self,
        scheduler: Scheduler,
        builder: InputBuilder,
        executor: Executor,
        vocab_size: int,
        adapters: EngineAdapters | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.adapters = adapters or EngineAdapters(scheduler, executor)
        self.interrupts = self.adapters.interrupts
        self.stats = EngineStats()
        self._vocab_size = vocab_size
        self._builder = builder
        self._grammars = grammars or Grammars()
        self._masks = builder.sampling.masks or TokenMasks(vocab_size)
        builder.sampling.masks = self._masks
        self._in_flight: deque[tuple[ScheduledStep, BuiltStep]] = deque()
        self._live: dict[str, _Live] = {}
        self._outbox: list[SequenceOutput] = []
        self._must_restart = False  # the executor, which has failed

    @property
    def has_work(self) -> bool:
        return bool(self._outbox or self._in_flight or self.scheduler.has_work or self._grammars.waiting)

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
        executor = executor or create_executor(config.parallel, plan, model_path)
        try:
            tokenizer = resolve_model(config.tokenizer) if config.tokenizer else model_path
            file = tokenizer / "tokenizer.json"
            grammars = Grammars(file if file.is_file() else None, plan.vocab_size, eos)
            store = create_store(config, plan, executor)
            scheduler = make_scheduler(config, plan, eos, None if store is None else store.device_bytes)
            builder = make_builder(config, plan, eos, buckets)
            adapters = EngineAdapters(scheduler, executor, store)
            return cls(scheduler, builder, executor, plan.vocab_size, adapters, grammars)
        except BaseException:
            executor.close()
            raise

    def warm_up(self) -> None:
        """Do now what the first request of some kind would hold up others with."""
        self._grammars.warm_up()

    def check(self, request: EngineRequest) -> None:
        """ValueError, naming the field, for a request that makes no sense to this model or could never be
        served."""
        check_vocabulary(request.prompt_ids, request.params, self._vocab_size)
        if request.params.structured_outputs is not None:
            self._grammars.check()
        if request.request_id in self._grammars.waiting:
            raise ValueError(f"request_id: {request.request_id!r} is in use")
        self.scheduler.check(self._as_sequence(request))

    def add(self, request: EngineRequest) -> None:
        """Queue a request that `check` accepts; ValueError for any other, and nothing changes."""
        self.check(request)
        sequence = self._as_sequence(request)
        with self.interrupts.held():
            self.adapters.acquire(sequence)
            try:
                if request.params.structured_outputs is None:
                    self.scheduler.add(sequence)
                else:
                    self.scheduler.arrive(sequence)
                    self._grammars.start(sequence, request.params.structured_outputs)
            except BaseException:
                self.adapters.release(sequence)
                raise
            self._live[sequence.id] = _Live(sequence, request.arrival, family={sequence.id})
            self.stats.num_requests += 1

    def _as_sequence(self, request: EngineRequest) -> Request:
        """Bound to what its adapter's name means now, whatever the name will mean later."""
        adapter_id, adapter_start = self.adapters.bind(request.adapter, request.prompt_ids)
        return Request(
            id=request.request_id,
            prompt_ids=request.prompt_ids,
            params=request.params,
            priority=request.priority,
            adapter=request.adapter,
            adapter_id=adapter_id,
            adapter_start=adapter_start,
            cache_salt=request.cache_salt,
        )

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop one continuation of a request, or all of them. Unknown or finished ones are left alone."""
        with self.interrupts.held():
            for live in list(self._live.values()):
                request = live.request
                if request_id in (request.id, request.parent_id) and index in (None, request.index):
                    self._abort(request.id, None)

    def step(self) -> list[SequenceOutput]:
        """Start as many steps as may be in flight, finish the oldest; returns what sequences gained.

        Whatever is raised on the way (by the model, or by Ctrl-C) goes on to the caller, and the engine stays
        usable: what was in flight is dropped, and its sequences compute again. After a RankFailure there are
        none: all are aborted, as the next call says, and the executor is restarted for those that come later.
        Ctrl-C comes before, while the model runs or is waited for, or after: a caller to whom what this
        returns must not be lost holds it off (`interrupts.held`).
        """
        with self.interrupts.held():
            with self.interrupts.let_through():
                pass  # what came before: nothing need be computed again for that
            try:
                if self._must_restart and self._live:
                    with self.interrupts.let_through():
                        self.executor.restart()
                    self._must_restart = False
                self._finish_loads()
                self._add_compiled()
                while len(self._in_flight) < self.executor.max_in_flight and self._start_step():
                    pass
                if self._in_flight:
                    self._finish_step()
                elif not self._outbox and self.scheduler.waiting_for_adapters:
                    self.adapters.wait()
                elif not self._outbox and self._grammars.waiting:
                    with self.interrupts.let_through():
                        self._grammars.wait()
            except BaseException as error:
                self._restart()
                if isinstance(error, RankFailure):
                    for request_id in list(self._live):
                        self._abort(request_id, str(error))
                    self.adapters.drop_loads()
                    self._must_restart = True
                raise
            finally:
                self.adapters.step_ended()
            outputs, self._outbox = self._outbox, []
            return outputs

    def gauges(self) -> dict[str, Any]:
        """Counters since the start and gauges of this moment; with adapters, "adapters" maps each name that
        was used to its counters."""
        gauges = self.stats.gauges(self.scheduler)
        return {**gauges, **self.executor.gauges(), **self._grammars.gauges(), **self.adapters.gauges()}

    def unfinished(self) -> Iterator[tuple[Request, float]]:
        """Every sequence that has not finished, and when it arrived (monotonic seconds); the oldest first."""
        return ((live.request, live.arrival) for live in self._live.values())

    def wait_for_load(self, future: Future[T]) -> T:
        """The result of `adapters.load`, for a caller that has nothing else to do."""
        with self.interrupts.held():
            while not future.done():
                self.adapters.wait()
                self._finish_loads()
        return future.result()

    def close(self) -> None:
        try:
            self.adapters.close()
            self._grammars.close()
            self._masks.close()
        finally:
            self.executor.close()

    def _finish_loads(self) -> None:
        for event in self.adapters.finish_loads():
            self._emit(self._live[event.request_id].request)

    def _add_compiled(self) -> None:
        """Queue those whose grammars are there."""
        for request, grammar, error in self._grammars.take():
            if grammar is not None:
                self._masks.begin(request, grammar)
                self.scheduler.add(request)
            else:
                self._end_unqueued(request, error)

    def _start_step(self) -> bool:
        begin = time.perf_counter()
        step = self.scheduler.schedule()
        scheduled = time.perf_counter()
        self.stats.seconds["schedule"] += scheduled - begin
        self.adapters.start_loads()
        if step is None:
            return False
        built = self._builder.build(step, self.scheduler.requests)
        self.stats.seconds["build"] += time.perf_counter() - scheduled
        now = time.monotonic()
        live_ones = self._live
        for seq in step.sequences:
            live = live_ones[seq.request_id]
            if live.first_scheduled is None:
                live.first_scheduled = now
            if len(seq.samples) > 1:  # continuations fork here
                self._begin_children(live, seq.samples)
        self.stats.num_computed_tokens += step.num_tokens
        self.adapters.step_begins()
        with self.interrupts.let_through():
            self.executor.submit(built.input)
        self._in_flight.append((step, built))
        self.stats.num_steps += 1
        return True

    def _begin_children(self, parent: _Live, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id not in self._live:
                child = self.scheduler.requests[request_id]
                self.adapters.acquire(child)
                parent.family.add(request_id)
                self._live[request_id] = _Live(
                    child, parent.arrival, parent.first_scheduled, family=parent.family
                )

    def _finish_step(self) -> None:
        with self.interrupts.let_through():
            result = self.executor.collect()
        begin = time.perf_counter()
        step, built = self._in_flight.popleft()
        if result.step_id != step.step_id:
            raise RuntimeError(f"executor returned step {result.step_id}, expected {step.step_id}")
        sampled = dict(zip(built.sample_ids, result.token_ids, strict=True))
        for request_id, scored in scores.of_prompts(built, result, self.scheduler.requests).items():
            live = self._live[request_id]
            live.num_prompt_scored += len(scored)
            self._emit(live.request, prompt_logprobs=scored)
        for request_id in [request_id for request_id, token_id in sampled.items() if token_id < 0]:
            self.scheduler.distrust(request_id)
            self.stats.num_not_finite += request_id in self._live  # or a step in flight has one more
            self._abort(request_id, NOT_FINITE)
        complete = self._follow_grammars(built, sampled)
        logprobs = scores.of_draws(built, result, self.scheduler.requests)
        now = time.monotonic()
        for request_id, token_id, _ in self.scheduler.update(step.step_id, sampled, complete):
            live = self._live[request_id]
            if token_id is None:
                self._emit(live.request)
                continue
            if live.first_token is None:
                live.first_token = now
            self.stats.num_generated_tokens += 1
            self._emit(
                live.request,
                [token_id],
                [logprobs[request_id]] if request_id in logprobs else None,
                ends_in_text=request_id in complete
                and token_id not in self._masks.eos_token_ids
                and live.request.stop_reason is None,
            )
        self.stats.seconds["forward"] += result.forward_seconds
        self.stats.seconds["sample"] += result.sample_seconds
        self.stats.seconds["update"] += time.perf_counter() - begin

    def _follow_grammars(self, built: BuiltStep, sampled: Mapping[str, int]) -> set[str]:
        """Returns those whose text is complete with the token that they drew. One whose grammar can't go on
        from there ends, and nobody else."""
        complete: set[str] = set()
        if built.input.sampling is None or (allowed := built.input.sampling.allowed) is None:
            return complete
        for row in allowed.rows:
            request_id = built.sample_ids[row]
            request = self.scheduler.requests.get(request_id)
            if request is None or request.params.structured_outputs is None:
                continue
            is_complete, error = self._masks.accept(request, sampled[request_id])
            if error is not None:
                self._abort(request_id, error)
            elif is_complete:
                complete.add(request_id)
        return complete

    def _restart(self) -> None:
        self._in_flight.clear()
        self.executor.reset()
        self._masks.reset()
        for request_id in self.scheduler.restart():
            if live := self._live.pop(request_id, None):
                live.family.discard(request_id)
                self.adapters.release(live.request)
                self._masks.forget(live.request, is_last=not live.family)
        self._builder.reset({name: live.num_prompt_scored for name, live in self._live.items()})

    def _abort(self, request_id: str, reason: str | None) -> None:
        if (waiting := self._grammars.cancel(request_id)) is not None:
            self._end_unqueued(waiting, reason)
        if (live := self._live.get(request_id)) is not None and not live.request.output_ids:
            self._end_unborn(live, reason)
        for event in self.scheduler.abort(request_id, stop_reason=reason):
            self._emit(self._live[event.request_id].request)

    def _end_unqueued(self, request: Request, reason: str | None) -> None:
        """Abort a request that the scheduler doesn't know."""
        self._end_unborn(self._live[request.id], reason)
        request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ABORT
        request.stop_reason = reason
        self._emit(request)

    def _end_unborn(self, parent: _Live, reason: str | None) -> None:
        """A request ends before its continuations are there: each of them has an end, too."""
        for child in parent.request.children():
            if child.id not in self._live:
                self.adapters.acquire(child)
                parent.family.add(child.id)
                self._live[child.id] = _Live(child, parent.arrival, family=parent.family)
                self._end_unqueued(child, reason)

    def _emit(
        self,
        request: Request,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        ends_in_text: bool = False,
    ) -> None:
        metrics = None
        if request.finish_reason is not None:
            live = self._live.pop(request.id)
            live.family.discard(request.id)
            self.adapters.release(request)
            self._masks.forget(request, is_last=not live.family)
            self.stats.num_finished_sequences += 1
            self.stats.num_finished_requests += not live.family
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
                token_ids=token_ids or [],
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                ends_in_text=ends_in_text,
                metrics=metrics,
            )
        )
