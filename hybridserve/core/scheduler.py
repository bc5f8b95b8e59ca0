"""Who runs next, on how many tokens, in whose memory. Knows requests, budgets and memory; does not know
tensors, clocks, text or what a token means, beyond the ids that end a sequence.

There are no phases (D5): a sequence has tokens and computed tokens, a step closes part of the gap.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from hybridserve.core.cache_manager import CacheManager
from hybridserve.core.request import FinishReason, Request, RequestStatus
from hybridserve.core.request_queue import RequestQueue
from hybridserve.core.slabs import IntegrityError
from hybridserve.core.step import ScheduledSequence, ScheduledStep, UnitCopy

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hybridserve.core.cache_spec import CacheLayout

AGING = 256
"""Under the priority policy, one level weighs as much as having arrived this many requests earlier. So at
most that many later arrivals a level go before a request, and two requests never change places."""

MAX_STEPS_IN_FLIGHT = 2


class TokenEvent(NamedTuple):
    """What a step, or an abort, meant for a request. Without a token where only the end is news."""

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None


@dataclass(slots=True)
class SchedulerCounters:
    num_preemptions: int = 0
    num_forks: int = 0
    num_failed_forks: int = 0
    """Children that had to compute the prompt again, because memory or max_num_seqs allowed no fork."""


class _Fork(NamedTuple):
    """Children that wait for the next step to copy what their parent has computed. If the parent ends before
    that, its memory lives on until then."""

    parent: Request
    children: list[Request]


@dataclass(slots=True)
class _Flight:
    """A step being planned, then in flight."""

    step_id: int
    budget: int
    sequences: list[ScheduledSequence] = field(default_factory=list)
    state_copies: list[UnitCopy] = field(default_factory=list)
    block_copies: list[UnitCopy] = field(default_factory=list)
    draws: list[Request] = field(default_factory=list)
    completed: list[Request] = field(default_factory=list)  # prompts done, of requests that draw nothing


class Scheduler:
    """Plans steps over all requests; the only one, with the cache manager, that changes a request.

    Use: `schedule()`, run the step, `update()`. One more step may be planned while one is in flight (D5): it
    works on tokens that are drawn but not yet known, and what a step in flight may write is free only after
    that step.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Literal["fcfs", "priority"] = "fcfs",
        eos_token_ids: Collection[int] = (),
        check_integrity: bool = False,
    ) -> None:
        if min(max_num_seqs, max_num_batched_tokens, max_model_len) < 1:
            raise ValueError(
                f"max_num_seqs ({max_num_seqs}), max_num_batched_tokens ({max_num_batched_tokens}) and "
                f"max_model_len ({max_model_len}) must be at least 1"
            )
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"policy: {policy!r} is neither 'fcfs' nor 'priority'")
        self.layout = layout
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy = policy
        self.cache = CacheManager(layout)
        self.counters = SchedulerCounters()
        self._eos_token_ids = frozenset(eos_token_ids)
        self._checks = check_integrity
        self._requests: dict[str, Request] = {}
        self._running = RequestQueue()
        self._waiting = RequestQueue()  # those whose tokens are all known
        self._forks: dict[str, _Fork] = {}  # by parent id
        self._in_flight: deque[_Flight] = deque()
        self._finished: list[str] = []
        self._num_arrivals = 0
        self._next_step_id = 0

    @property
    def requests(self) -> Mapping[str, Request]:
        """All that have not finished, by id."""
        return MappingProxyType(self._requests)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._running)

    # ---- requests come and go

    def check(self, request: Request) -> None:
        """Raise ValueError, naming the field, for a request that could never run."""
        layout, params, num_prompt = self.layout, request.params, request.num_prompt
        if "#" in request.id:
            raise ValueError(f"request_id: {request.id!r} has a '#', which names the continuations of n > 1")
        if any(name in self._requests for name in (request.id, *request.child_ids)):
            raise ValueError(f"request_id: {request.id!r} is in use")
        if request.priority and self.policy == "fcfs":
            raise ValueError(f"priority: {request.priority} has no effect, scheduler.policy is 'fcfs'")
        if not num_prompt:
            raise ValueError("prompt: is empty")
        if num_prompt > self.max_model_len:
            raise ValueError(f"prompt: {num_prompt} tokens, max_model_len is {self.max_model_len}")
        if num_prompt == self.max_model_len and params.max_tokens:
            raise ValueError(f"prompt: {num_prompt} tokens leave no room to generate; that is max_model_len")
        num_cached = self._max_computed(request)
        if layout.slabs_for(num_cached) > layout.num_usable_slabs:
            field_name = "max_tokens" if layout.slabs_for(num_prompt) <= layout.num_usable_slabs else "prompt"
            raise ValueError(
                f"{field_name}: {num_prompt} tokens of prompt and up to {params.max_tokens} generated need "
                f"{num_cached} in the cache; it holds {layout.max_tokens_one_sequence() or 0} of one sequence"
            )

    def add(self, request: Request) -> None:
        """Queue a request that `check` accepts; ValueError for any other."""
        self.check(request)
        request.max_computed = self._max_computed(request)
        request.arrival_seq = self._num_arrivals
        self._num_arrivals += 1
        level = request.priority if self.policy == "priority" else 0
        request.order = (request.arrival_seq + level * AGING, request.arrival_seq, 0)
        self._requests[request.id] = request
        self._waiting.add(request)

    def _max_computed(self, request: Request) -> int:
        longest = min(request.num_prompt + request.params.max_tokens, self.max_model_len)
        return max(request.num_prompt, longest - 1)

    def abort(
        self,
        request_id: str,
        finish_reason: FinishReason = FinishReason.ABORT,
        stop_reason: int | str | None = None,
    ) -> list[TokenEvent]:
        """End a request, whatever its state; nothing happens to an id that is unknown or has finished.

        Until the first tokens of an n > 1 request are known, its continuations end with it; after that each
        of them is aborted by its own id.
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        children = [self._requests[name] for name in request.child_ids if name in self._requests]
        ended = [request, *(child for child in children if not child.output_ids)]
        for one in ended:
            one.stop_reason = stop_reason
            self._finish(one, finish_reason)
        return [TokenEvent(one.id, None, finish_reason) for one in ended]

    def preempt(self, request: Request) -> None:
        """Take a running request's memory; it will compute its tokens again, as one longer prompt.

        This is the place that will choose between that and moving the memory to the host.
        """
        if request.status is not RequestStatus.RUNNING:
            raise ValueError(f"request {request.id!r} is not running")
        self._running.discard(request)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._queue_when_known(request)

    def restart(self) -> list[str]:
        """Go on after a step that failed or was interrupted: nobody knows what it wrote, and it can't be run
        again (D7). All memory is taken back and every sequence computes again, as after a preemption.

        Returns the ids of continuations that end: their first token was in flight. They are born again, under
        the same ids, with that of their parent.
        """
        unborn = [r.id for r in self._requests.values() if r.parent_id is not None and not r.output_ids]
        for request_id in unborn:
            del self._requests[request_id]
        self._finished += [name for name, request in self._requests.items() if request.block_ids]
        self._finished += self._forks
        self.cache = CacheManager(self.layout)
        self._running, self._waiting = RequestQueue(), RequestQueue()
        self._forks.clear()
        self._in_flight.clear()
        for request in self._requests.values():
            if request.status is RequestStatus.RUNNING:
                request.num_preemptions += 1
                self.counters.num_preemptions += 1
            request.status, request.last_step = RequestStatus.WAITING, -1
            request.block_ids, request.state_slot = (), 0
            request.num_computed = request.num_pending = 0
            self._waiting.add(request)
        return unborn

    # ---- planning

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None where nothing can run before `update` brings what is in flight."""
        if len(self._in_flight) == MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(f"{MAX_STEPS_IN_FLIGHT} steps are in flight: update() comes next")
        plan = _Flight(self._next_step_id, self.max_num_batched_tokens)
        self._fork_children(plan)
        self._schedule_running(plan)
        self._admit_waiting(plan)
        if not plan.sequences:
            return None
        step = ScheduledStep(
            step_id=plan.step_id,
            sequences=tuple(plan.sequences),
            state_copies=tuple(plan.state_copies),
            block_copies=tuple(plan.block_copies),
            finished=tuple(dict.fromkeys(self._finished)),
        )
        self._finished.clear()
        self._in_flight.append(plan)
        self._next_step_id += 1
        if self._checks:
            self.check_integrity()
        return step

    def _fork_children(self, plan: _Flight) -> None:
        """Before the parents' states move on. A child that finds no room computes its prompt instead."""
        if not self._forks:
            return
        promised = self._num_promised_blocks() + (self.layout.blocks_per_slab > 0)
        for parent_id, (parent, children) in list(self._forks.items()):
            if parent.num_pending and parent.params.has_penalties:
                continue  # neither parent nor child can run before the tokens are known: no hurry
            del self._forks[parent_id]
            for child in children:
                room = len(self._running) < self.max_num_seqs and self.cache.fits(promised, 1)
                copies = self.cache.fork(parent, child) if room and parent.num_computed else None
                if copies is None:
                    self.counters.num_failed_forks += 1
                    self._queue_when_known(child)
                    continue
                plan.state_copies += copies.state
                plan.block_copies += copies.blocks
                parent.last_step = child.last_step = plan.step_id
                child.status = RequestStatus.RUNNING
                self._running.add(child)
                self.counters.num_forks += 1
            if parent.status is RequestStatus.FINISHED:
                self._release(parent)

    def _schedule_running(self, plan: _Flight) -> None:
        todo = [(request, count) for request in self._running if (count := request.num_runnable)]
        num_decodes = sum([count == 1 for _, count in todo])
        starved = False
        for request, count in todo:
            if not plan.budget or request.status is not RequestStatus.RUNNING:
                break
            num_decodes -= count == 1
            # A long prompt leaves room for the decodes after it.
            length = min(count, max(1, plan.budget - num_decodes))
            num_tokens = request.num_computed + length
            num_blocks = self.cache.blocks_needed(request, num_tokens)
            if num_blocks and (starved or not self._make_room(request, num_tokens, num_blocks)):
                starved = True  # from here on, only those that need no memory
                continue
            self._advance(plan, request, length)

    def _make_room(self, request: Request, num_tokens: int, num_blocks: int) -> bool:
        """Reserve for a running sequence; as long as there is too little, the last in order, perhaps itself,
        gives up its memory. False where the sequence has to sit this step out: because a step in flight may
        still write what was given up, or because it was itself the last."""
        while not self.cache.reserve(request, num_tokens):
            if not self.cache.is_short_of(num_blocks):
                return False
            victim = self._running.last
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _admit_waiting(self, plan: _Flight) -> None:
        """Start waiting requests, in order, as long as all their known tokens and the next one fit beside the
        known tokens of those that run: what is sure to be needed is not given away."""
        if not self._waiting or len(self._running) >= self.max_num_seqs:
            return
        promised = self._num_promised_blocks()
        while self._waiting and plan.budget and len(self._running) < self.max_num_seqs:
            request = self._waiting.first
            num_blocks = self.layout.blocks_for(min(request.num_tokens + 1, request.max_computed))
            if not self.cache.fits(promised + num_blocks, 1):
                break
            length = min(request.num_tokens, plan.budget)
            self.cache.reserve(request, length)
            self._waiting.discard(request)
            request.status = RequestStatus.RUNNING
            self._running.add(request)
            promised += num_blocks - len(request.block_ids)
            self._advance(plan, request, length)

    def _num_promised_blocks(self) -> int:
        """Blocks that the running sequences lack for the tokens that they have."""
        needed, running = self.cache.blocks_needed, self._running
        return sum(needed(request, min(request.num_tokens, request.max_computed)) for request in running)

    def _advance(self, plan: _Flight, request: Request, length: int) -> None:
        """Put the next `length` tokens of a request, whose memory is reserved, into the step."""
        start, end = request.num_computed, request.num_computed + length
        samples: tuple[str, ...] = ()
        if end == request.num_tokens:
            if request.params.max_tokens == 0:
                plan.completed.append(request)
            else:
                samples = (request.id,)
                plan.draws.append(request)
                if end == request.num_prompt and request.params.n > 1:
                    children = self._create_children(request)
                    samples += tuple(child.id for child in children)
                    plan.draws += children
                request.num_pending += 1
        request.num_computed = end
        request.last_step = plan.step_id
        plan.budget -= length
        has_state = start > 0 and request.state_slot > 0
        blocks, slot = request.block_ids, request.state_slot
        plan.sequences.append(ScheduledSequence(request.id, start, length, samples, has_state, blocks, slot))

    def _create_children(self, parent: Request) -> list[Request]:
        children = parent.children()
        self._requests.update((child.id, child) for child in children)
        if parent.max_computed > parent.num_prompt:
            self._forks[parent.id] = _Fork(parent, list(children))
        return children

    # ---- results

    def update(self, step_id: int, sampled: Mapping[str, int]) -> list[TokenEvent]:
        """Take in what the oldest step in flight drew: a token id for each request in `samples` of its
        sequences. Tokens of requests that have ended meanwhile are dropped.
        """
        if not self._in_flight or self._in_flight[0].step_id != step_id:
            raise ValueError(f"step_id: {step_id} is not the oldest step in flight")
        flight = self._in_flight.popleft()
        self.cache.step_finished(step_id)
        events = []
        for request in flight.draws:
            if request.status is RequestStatus.FINISHED:
                continue
            token = sampled[request.id]
            request.output_ids.append(token)
            request.num_pending -= 1
            finish_reason = self._check_finished(request, token)
            events.append(TokenEvent(request.id, token, finish_reason))
            if finish_reason is not None:
                self._finish(request, finish_reason)
            elif request.status is RequestStatus.WAITING and not self._will_fork(request):
                self._queue_when_known(request)
        for request in flight.completed:
            if request.status is not RequestStatus.FINISHED:
                events.append(TokenEvent(request.id, None, FinishReason.LENGTH))
                self._finish(request, FinishReason.LENGTH)
        if self._checks:
            self.check_integrity()
        return events

    def _check_finished(self, request: Request, token: int) -> FinishReason | None:
        params = request.params
        if len(request.output_ids) > params.min_tokens:
            if token in params.stop_token_ids:
                request.stop_reason = token
                return FinishReason.STOP
            if token in self._eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
        return FinishReason.LENGTH if request.num_known > request.max_computed else None

    def _finish(self, request: Request, finish_reason: FinishReason) -> None:
        (self._running if request.status is RequestStatus.RUNNING else self._waiting).discard(request)
        del self._requests[request.id]
        request.status, request.finish_reason = RequestStatus.FINISHED, finish_reason
        request.num_pending = 0
        fork = self._forks.get(request.parent_id or request.id)
        if fork is not None and request is fork.parent:
            return  # its children still need what it holds
        self._release(request)
        if fork is not None and request in fork.children:
            fork.children.remove(request)
            if not fork.children:
                del self._forks[fork.parent.id]
                if fork.parent.status is RequestStatus.FINISHED:
                    self._release(fork.parent)

    def _release(self, request: Request) -> None:
        if request.block_ids or request.state_slot:
            self._finished.append(request.id)
            self.cache.release(request)

    def _will_fork(self, request: Request) -> bool:
        fork = self._forks.get(request.parent_id or "")
        return fork is not None and request in fork.children

    def _queue_when_known(self, request: Request) -> None:
        """A waiting request whose last token is still being drawn is queued by the update that brings it."""
        if not request.num_pending:
            self._waiting.add(request)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless requests, queues and memory agree. Costs O(memory in use)."""
        self._running.check_integrity(RequestStatus.RUNNING)
        self._waiting.check_integrity(RequestStatus.WAITING)
        if len(self._running) > self.max_num_seqs:
            raise IntegrityError(f"{len(self._running)} sequences run, max_num_seqs is {self.max_num_seqs}")
        queued = {request.id: request for request in (*self._running, *self._waiting)}
        if any(self._requests.get(name) is not request for name, request in queued.items()):
            raise IntegrityError("a request that has finished is queued")
        for request in self._requests.values():
            if request.id not in queued and not request.num_pending and not self._will_fork(request):
                raise IntegrityError(f"request {request.id!r} is in no queue and nothing will put it there")
            if request.status is RequestStatus.WAITING and (request.block_ids or request.state_slot):
                raise IntegrityError(f"request {request.id!r} is waiting, but holds memory")
        ended = [fork.parent for fork in self._forks.values() if fork.parent.status is RequestStatus.FINISHED]
        self.cache.check_integrity([*self._requests.values(), *ended])
