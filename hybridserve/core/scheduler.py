"""Who runs next, on how many tokens, in whose memory. Knows requests, budgets and memory; does not know
tensors, clocks, text or what a token means, beyond the ids that end a sequence.

There are no phases (D5): a sequence has tokens and computed tokens, a step closes part of the gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.core.live_requests import LiveRequests, TokenEvent
from hybridserve.core.named import maker
from hybridserve.core.plan import StepPlan
from hybridserve.core.prefix_trails import Match
from hybridserve.core.request import FinishReason, Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hybridserve.core.step import ScheduledStep

MAX_STEPS_IN_FLIGHT = 2

_token_event = maker(TokenEvent)


def _up_to_cut(request: Request, length: int) -> int:
    """So much of a chunk as comes before the next checkpoint that is due."""
    return min(length, request.next_cut - request.num_computed) if request.next_cut else length


class Scheduler(LiveRequests):
    """Plans steps over all requests; the only one, with the cache manager, that changes a request.

    Use: `schedule()`, run the step, `update()`. One more step may be planned while one is in flight (D5): it
    works on tokens that are drawn but not yet known, and what a step in flight may write is free only after
    that step.
    """

    # ---- planning

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None where nothing can run before `update` brings what is in flight."""
        if len(self._in_flight) == MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(f"{MAX_STEPS_IN_FLIGHT} steps are in flight: update() comes next")
        plan = StepPlan(self._next_step_id, self.max_num_batched_tokens)
        self.cache.begin_step(plan)
        for request in self.cache.prefix.take_woken(plan.step_id):
            self._waiting.put_back(request)  # what it waited for is there, or is not coming
        self._fork_children(plan)
        self._fill(plan)
        if not plan.shares and self.cache.compactor.lift_bound():
            self._fill(plan)
        if not plan.shares:
            return None
        plan.state_saves = self.cache.plan_saves(
            plan.step_id, self._num_promised_blocks, is_starved=plan.is_starved
        )
        moves, moved = self.cache.take_moves()
        self.counters.num_swap_bytes += self.cache.host.num_planned_bytes
        step = plan.freeze(
            self._finished,
            self.adapters.generation,
            swaps_out=self.cache.host.take_swaps_out(),
            moves=moves,
            moved=moved,
        )
        self._finished.clear()
        self._in_flight.append(plan)
        self._next_step_id += 1
        if self._checks:
            self.check_integrity()
        return step

    def _fill(self, plan: StepPlan) -> None:
        plan.is_starved = False
        self._schedule_running(plan)
        self._turns.assign(plan.step_id)
        self._admit_waiting(plan)

    def _fork_children(self, plan: StepPlan) -> None:
        """Before the parents' states move on. A child that finds no room computes its prompt instead."""
        if not self._forks:
            return
        promised = self._num_promised_blocks() + (self.layout.blocks_per_slab > 0)
        for parent, children in self._forks.take():
            for child in children:
                room = self._may_run(child) and self.cache.make_room(promised, 1)
                copies = self.cache.fork(parent, child) if room and parent.has_memory else None
                if copies is None:
                    self.counters.num_failed_forks += 1
                    self._queue_when_known(child)
                    continue
                plan.fork(parent, child, copies)
                self._start_running(child)
                self.counters.num_forks += 1
            if parent.status is RequestStatus.FINISHED:
                self._release_all(parent)

    def _schedule_running(self, plan: StepPlan) -> None:
        todo = [(request, count) for request in self._running if (count := request.num_runnable)]
        num_decodes = sum([count == 1 for _, count in todo])
        block_size, running = self.layout.block_size, RequestStatus.RUNNING
        for request, count in todo:
            if not plan.budget or request.status is not running:
                break
            if count == 1:
                num_decodes -= 1
                length = 1
            else:  # a long prompt leaves room for the decodes after it
                length = _up_to_cut(request, min(count, max(1, plan.budget - num_decodes)))
            num_tokens = request.num_computed + length
            if num_tokens > len(request.block_ids) * block_size:
                num_blocks = self.cache.blocks_needed(request, num_tokens)
                if num_blocks and (plan.is_starved or not self._make_room(request, num_tokens, num_blocks)):
                    plan.is_starved = True  # from here on, only those that need no memory
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

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Start waiting requests, in their turn, as long as all their known tokens and the next one fit
        beside the known tokens of those that run: what is sure to be needed is not given away. The first that
        doesn't fit ends it, however small those after it are."""
        if self._waiting.first is None or len(self._running) >= self.max_num_seqs:
            return
        promised, prefix = self._num_promised_blocks(), self.cache.prefix
        while plan.budget and len(self._running) < self.max_num_seqs and (request := self._waiting.first):
            is_swapped_out = request.is_swapped_out
            match = prefix.match_again(request) if is_swapped_out else prefix.match(request)
            if not is_swapped_out and prefix.wait(request, match, plan.step_id):
                self._waiting.discard(request)
                continue
            num_tokens = min(request.num_tokens + 1, request.max_computed)
            num_blocks = self.layout.blocks_for(num_tokens) - len(match.shared)
            is_admitted = self.cache.admit(request, match, promised + num_blocks, plan)
            if not is_admitted and match.node is not None:  # the checkpoint may be in the way of its own slot
                match, num_blocks = Match(), num_blocks + len(match.shared)
                is_admitted = self.cache.admit(request, match, promised + num_blocks, plan)
            if not is_admitted:
                break
            if is_swapped_out:
                self.counters.num_swaps_in += 1
                self.counters.num_swap_bytes += self.cache.swapped_bytes(request, len(match.shared))
            length = _up_to_cut(request, min(request.num_tokens - request.num_computed, plan.budget))
            self.cache.reserve(request, request.num_computed + length)
            self._waiting.discard(request)
            self._start_running(request)
            promised += num_blocks + len(match.shared) - len(request.block_ids)
            self._advance(plan, request, length)

    def _num_promised_blocks(self) -> int:
        """Blocks that the running sequences lack for the tokens that they have."""
        if not self.layout.blocks_per_slab:
            return 0
        size, num_promised = self.layout.block_size, 0
        for request in self._running:  # a hot path
            num_held = len(request.block_ids)
            num_lacking = min(request.num_tokens, request.max_computed) - num_held * size
            if num_lacking > 0:
                num_promised += -(-num_lacking // size)
        return num_promised

    def _advance(self, plan: StepPlan, request: Request, length: int) -> None:
        """Put the next `length` tokens of a request, whose memory is reserved, into the step."""
        start, size = request.num_computed, self.layout.block_size
        end = start + length
        samples: tuple[str, ...] = ()
        request.num_computed = end  # before children come, who would ask for a checkpoint within this chunk
        num_prompt = len(request.prompt_ids)
        if end == num_prompt + len(request.output_ids) + request.num_pending:
            if request.params.max_tokens == 0:
                plan.completed.append(request)
            else:
                samples = (request.id,)
                plan.draws.append(request)
                if end == num_prompt and request.params.n > 1:
                    children = self._create_children(request)
                    samples += tuple(child.id for child in children)
                    plan.draws += children
                request.num_pending += 1
        request.last_step = plan.step_id
        if end // size > start // size:
            self.cache.prefix.computed(request, start)
        plan.budget -= length
        share = self._waiting.shares[request.adapter]
        share.num_computed_tokens += length
        adapter_slot = 0
        if request.adapter_id is not None:
            adapter_slot = self._turns.charge(request.adapter_id, share, length, plan.step_id)
            plan.adapter_slots.add(adapter_slot)
        plan.shares.append((request, start, length, samples, adapter_slot))

    # ---- results

    def update(
        self, step_id: int, sampled: Mapping[str, int], complete: Collection[str] = ()
    ) -> list[TokenEvent]:
        """Take in what the oldest step in flight drew: a token id for each request in `samples` of its
        sequences. Tokens of requests that have ended meanwhile are dropped. `complete`: requests that may
        draw nothing after it.
        """
        if not self._in_flight or self._in_flight[0].step_id != step_id:
            raise ValueError(f"step_id: {step_id} is not the oldest step in flight")
        flight = self._in_flight.popleft()
        self.cache.step_finished(step_id)
        self.adapters.step_finished(step_id)
        waiting, finished = RequestStatus.WAITING, RequestStatus.FINISHED
        drawn = [request for request in flight.draws if request.status is not finished]
        self.cache.prefix.drew(drawn)
        shares, finish_reason_of = self._waiting.shares, self._limits.finish_reason
        events = []
        for request in drawn:
            request_id = request.id
            token = sampled[request_id]
            request.output_ids.append(token)
            request.num_pending -= 1
            shares[request.adapter].num_generated_tokens += 1
            finish_reason = finish_reason_of(request, token, request_id in complete)
            events.append(_token_event((request_id, token, finish_reason)))
            if finish_reason is not None:
                self._finish(request, finish_reason)
            elif request.status is waiting and not self._forks.waits(request):
                self._queue_when_known(request)
        for request in flight.completed:
            if request.status is not finished:
                events.append(TokenEvent(request.id, None, FinishReason.LENGTH))
                self._finish(request, FinishReason.LENGTH)
        if self._checks:
            self.check_integrity()
        return events
