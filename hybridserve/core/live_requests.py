"""How requests come, start, lose their memory and go; each is in a queue, or known to wait for something.
Knows requests, queues and who holds memory and adapters; does not know what a step computes.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from hybridserve.core.adapter_slots import AdapterSlots
from hybridserve.core.adapter_turns import AdapterTurns
from hybridserve.core.cache_manager import CacheManager
from hybridserve.core.compaction import CompactionCounters
from hybridserve.core.fair_queue import FairQueue
from hybridserve.core.forks import Forks
from hybridserve.core.limits import Limits
from hybridserve.core.request import FinishReason, Request, RequestStatus
from hybridserve.core.request_queue import RequestQueue
from hybridserve.core.slabs import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from hybridserve.core.adapter_slots import AdapterLoad
    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.core.fair_queue import AdapterCounters
    from hybridserve.core.plan import StepPlan

AGING = 256
"""Under the priority policy, one level weighs as much as having arrived this many requests earlier. So at
most that many later arrivals a level go before a request, and two requests never change places."""


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
    num_swaps_out: int = 0
    """Of the preemptions, those that moved what was computed to the host's memory."""
    num_swaps_in: int = 0
    num_swap_bytes: int = 0
    """Of sequences, that steps copy out and in."""
    num_recomputed_instead: int = 0
    """Of the preemptions, those that should have, and for which it had no room, or which lost a copy that was
    about to be made."""


class LiveRequests:
    """All requests that have not finished, with the memory and the adapters that they hold.

    One that waits is in `_waiting`, unless its last token is being drawn, it is about to fork, or somebody
    else computes what it begins with. One that runs is in `_running`, and holds memory of the arena; nobody
    else does, but parents whose children are about to fork.
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
        adapters: AdapterSlots | None = None,
        adapter_bytes: Callable[[str], int] | None = None,
        fair_share: bool = True,
        max_running_per_adapter: int | None = None,
        prefix_caching: bool = False,
        checkpoint_interval: int = 0,
        num_host_slabs: int = 0,
        preemption: Literal["auto", "swap", "recompute"] = "auto",
        swap_bytes_per_token: int = 0,
    ) -> None:
        """With `adapters`, requests for adapters that are in no slot wait, in nobody's way, while those that
        `take_loads` returns are loaded; their end is reported with `adapter_loaded` or `adapter_failed`.
        Those of different adapters share the engine by tokens (`fair_share`; `FairQueue` has the rules), and
        at most `max_running_per_adapter` sequences that name the same one run. `adapter_bytes`: what an
        adapter, by its id, takes on the device.

        With `prefix_caching`, what was computed of a prefix is computed once (`PrefixCache`): a request
        begins where another has been, and waits for one that is on its way there.

        With `num_host_slabs` > 1 (slab 0 is never used), the host has memory for what the arena has none for:
        prefixes, and sequences that are preempted. `preemption` says whether those are swapped or computed
        again; "auto": swapped where their bytes take less time, out and in again, than their tokens. In the
        time of a token, `swap_bytes_per_token` bytes do.
        """
        if preemption == "swap" and num_host_slabs < 2:
            raise ValueError("preemption: 'swap' needs memory of the host (num_host_slabs)")
        self._limits = Limits(
            layout=layout,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=policy,
            eos_token_ids=frozenset(eos_token_ids),
            max_running_per_adapter=max_running_per_adapter,
        )
        self.layout = layout
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy = policy
        self.preemption, self.swap_bytes_per_token = preemption, swap_bytes_per_token
        self._new_cache = functools.partial(
            CacheManager,
            layout,
            num_host_slabs=num_host_slabs,
            prefix_caching=prefix_caching,
            checkpoint_interval=checkpoint_interval,
            compaction_counters=CompactionCounters(),
        )
        self.cache = self._new_cache()
        self.adapters = adapters or AdapterSlots(0)
        self.counters = SchedulerCounters()
        self._checks = check_integrity
        self._requests: dict[str, Request] = {}
        self._running = RequestQueue()
        # Of those that wait, the ones whose tokens are all known.
        self._waiting = FairQueue(self.adapters, fair=fair_share, max_running=max_running_per_adapter)
        self._turns = AdapterTurns(self.adapters, self._waiting, adapter_bytes, max_num_batched_tokens)
        self._forks = Forks()
        self._in_flight: deque[StepPlan] = deque()
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
        self._limits.check(request)
        if any(name in self._requests for name in (request.id, *request.child_ids)):
            raise ValueError(f"request_id: {request.id!r} is in use")
        self._turns.check(request.adapter_id)

    def arrive(self, request: Request) -> None:
        """Give a request that `check` accepts, ValueError for any other, its place among all that come. It is
        not queued yet."""
        self.check(request)
        request.max_computed = self._limits.max_computed(request)
        request.arrival_seq = self._num_arrivals
        self._num_arrivals += 1
        request.order = (request.arrival_seq + request.priority * AGING, request.arrival_seq, 0)

    def add(self, request: Request) -> None:
        """Queue a request, which arrives now unless it did before."""
        if not request.max_computed:
            self.arrive(request)
        self._requests[request.id] = request
        self.cache.prefix.open(request)
        self._waiting.open(request)
        self._waiting.add(request)

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

    def distrust(self, request_id: str) -> None:
        """What a request has computed is wrong: nobody else is to begin with it."""
        if (request := self._requests.get(request_id)) is not None:
            self.cache.prefix.distrust(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's memory. What is in it moves to the host's, and the request will go on
        where it was; or it will compute its tokens again, as one longer prompt."""
        if request.status is not RequestStatus.RUNNING:
            raise ValueError(f"request {request.id!r} is not running")
        self._stop_running(request)
        if not self._swap_out(request):
            request.num_computed = 0
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._queue_when_known(request)

    def _swap_out(self, request: Request) -> bool:
        """Whether it has been planned to move what a request has computed to the host's memory."""
        if not 0 < request.num_computed < request.num_tokens or self.preemption == "recompute":
            return False
        num_bytes = self.cache.swapped_bytes(request)
        if self.preemption == "auto" and num_bytes > request.num_computed * self.swap_bytes_per_token:
            return False
        # a fork that this very step would make has nothing yet
        if request.last_step == self._next_step_id or not self.cache.swap_out(request):
            self.counters.num_recomputed_instead += 1
            return False
        self.counters.num_swaps_out += 1
        return True

    def restart(self) -> list[str]:
        """Go on after a step that failed or was interrupted: nobody knows what it wrote, and it can't be run
        again (D7). All memory is taken back and every sequence computes again, as after a preemption.

        Returns the ids of continuations that end: their first token was in flight. They are born again, under
        the same ids, with that of their parent.
        """
        unborn = [r.id for r in self._requests.values() if r.parent_id is not None and not r.output_ids]
        self._finished += [name for name, request in self._requests.items() if request.has_memory]
        self._finished += self._forks.parent_ids
        self.cache = self._new_cache(counters=self.cache.prefix.counters)
        self.adapters.reset()
        self._forks.clear()
        self._in_flight.clear()
        for request_id in unborn:
            del self._requests[request_id]
        for request in self._requests.values():
            if request.status is RequestStatus.RUNNING:
                request.num_preemptions += 1
                self.counters.num_preemptions += 1
            request.status, request.last_step = RequestStatus.WAITING, -1
            request.block_ids, request.state_slot = (), 0
            request.host_block_ids, request.host_slot = (), 0
            request.num_computed = request.num_pending = request.write_from = request.next_cut = 0
            self.cache.prefix.open(request)
        self._running = RequestQueue()
        self._waiting.begin_again(self._requests.values())
        return unborn

    # ---- from one state to another

    def _may_run(self, request: Request) -> bool:
        return len(self._running) < self.max_num_seqs and self._waiting.may_run(request)

    def _start_running(self, request: Request) -> None:
        """Give a waiting request, which is in no queue and has memory, all else that running ones have."""
        request.status = RequestStatus.RUNNING
        self._running.add(request)
        self._waiting.start(request)
        if request.adapter_id is not None and self.adapters.acquire(request.adapter_id) is None:
            raise IntegrityError(f"request {request.id!r} starts and its adapter is in no slot")

    def _stop_running(self, request: Request) -> None:
        self._running.discard(request)
        self._waiting.stop(request)
        self.cache.prefix.stop(request)

    def _create_children(self, parent: Request) -> list[Request]:
        children = parent.children()
        for child in children:
            self._requests[child.id] = child
            self.cache.prefix.open(child)
            self._waiting.open(child)
        if parent.max_computed > parent.num_prompt:
            self._forks.add(parent, list(children))
        return children

    def _finish(self, request: Request, finish_reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
        else:
            self._waiting.discard(request)
        self.cache.prefix.close(request)
        self._waiting.close(request)
        del self._requests[request.id]
        if not request.output_ids and (parent := self._requests.get(request.parent_id or "")):
            parent.ended_children |= {request.index}
        request.status, request.finish_reason = RequestStatus.FINISHED, finish_reason
        request.num_pending = 0
        for one in self._forks.finish(request):
            self._release_all(one)

    def _release_all(self, request: Request) -> None:
        self._release(request)
        self.cache.host.release(request)

    def _release(self, request: Request) -> None:
        """Give up what only requests with memory in the arena hold."""
        if not request.has_memory:
            return
        self._finished.append(request.id)
        self.cache.release(request)
        if request.adapter_id is not None:
            self.adapters.release(request.adapter_id, request.last_step)

    def _queue_when_known(self, request: Request) -> None:
        """A waiting request whose last token is still being drawn is queued by the update that brings it."""
        if not request.num_pending:
            self._waiting.add(request)

    # ---- adapters

    def take_loads(self) -> list[AdapterLoad]:
        """Loads that `schedule` has decided on since the last call, to be done in this order."""
        return self._turns.take_loads()

    def adapter_loaded(self, slot: int) -> None:
        """The adapter of a load is in place."""
        self.adapters.finish_load(slot, ok=True)

    def adapter_failed(self, adapter_id: str, reason: str) -> list[TokenEvent]:
        """An adapter can't be loaded: end all requests that wait for it, with `reason` as `stop_reason`."""
        self.adapters.cancel_load(adapter_id)
        waiting = [
            request.id
            for request in self._requests.values()
            if request.adapter_id == adapter_id and request.status is RequestStatus.WAITING
        ]
        return [event for name in waiting for event in self.abort(name, stop_reason=reason)]

    @property
    def waiting_for_adapters(self) -> bool:
        """Whether nothing can run before a load has ended, so that there is no point in `schedule` now."""
        if not self._requests or self._in_flight or self._running or not self.adapters.num_loading:
            return False
        self._turns.refresh()
        return self._waiting.first is None

    def pin_adapter(self, adapter_id: str) -> None:
        """Keep an adapter in its slot until `adapters.unpin`. ValueError where it has none, and as
        `check_pin`."""
        self.check_pin(adapter_id)
        self.adapters.pin(adapter_id)

    def check_pin(self, adapter_id: str) -> None:
        """ValueError where an adapter, in a slot or not, may not be pinned: it would take the last slot, or
        the adapter of some request would find no room beside the pinned ones."""
        self._turns.check_pin(adapter_id, {request.adapter_id for request in self._requests.values()})

    def adapter_counters(self) -> Mapping[str, AdapterCounters]:
        """By name (`FairQueue.counters`); requests for no adapter under BASE."""
        return self._waiting.counters()

    # ---- checks

    def check_integrity(self) -> None:
        """Raise IntegrityError unless requests, queues, adapters and memory agree. Costs O(memory in use)."""
        self._running.check_integrity(RequestStatus.RUNNING)
        self._turns.check_integrity()
        if len(self._running) > self.max_num_seqs:
            raise IntegrityError(f"{len(self._running)} sequences run, max_num_seqs is {self.max_num_seqs}")
        queued = {request.id: request for request in (*self._running, *self._waiting)}
        if any(self._requests.get(name) is not request for name, request in queued.items()):
            raise IntegrityError("a request that has finished is queued")
        for request in self._requests.values():
            waits = self._forks.waits(request) or self.cache.prefix.holds(request)
            if request.id not in queued and not request.num_pending and not waits:
                raise IntegrityError(f"request {request.id!r} is in no queue and nothing will put it there")
            if request.status is RequestStatus.WAITING and request.has_memory:
                raise IntegrityError(f"request {request.id!r} is waiting, but holds memory")
            if request.status is RequestStatus.RUNNING and request.is_swapped_out:
                raise IntegrityError(f"request {request.id!r} runs, but is swapped out")
        holders = [*self._requests.values(), *self._forks.ended_parents]
        self.cache.check_integrity(holders)
        users = Counter(request.adapter_id for request in holders if request.has_memory)
        self.adapters.check_integrity({name: count for name, count in users.items() if name is not None})
