"""Anything may happen at any time: requests come and go, fork and are preempted (swapped out and in, too),
with steps in flight and restarts."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridserve.core.request import RequestStatus
from tests.harness.machines import drawn_engine
from tests.harness.scripted import VOCAB

MAX_MODEL_LEN = 40
NUM_SLABS = {"hybrid": (5, 9), "kv": (12, 20), "state": (3, 6)}


class SchedulerMachine(RuleBasedStateMachine):
    """The engine checks each step, the scheduler its own books; and tokens depend on all of the memory."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.engine = drawn_engine(
            data,
            num_slabs=NUM_SLABS,
            max_model_len=MAX_MODEL_LEN,
            most_tokens=20,
            policy=data.draw(st.sampled_from(["fcfs", "priority"])),
        )
        self.num_added = 0

    @rule(
        seed=st.integers(0, 2**16),
        length=st.integers(1, 12),
        priority=st.integers(-2, 2),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.sampled_from([0, 1, 2, 6, 30]),
        ignore_eos=st.booleans(),
        penalty=st.sampled_from([0.0, 0.0, 0.5]),
    )
    def add(
        self, seed: int, length: int, priority: int, n: int, max_tokens: int, ignore_eos: bool, penalty: float
    ) -> None:
        engine, rng = self.engine, random.Random(seed)
        engine.add(
            f"r{self.num_added}",
            [rng.randrange(VOCAB) for _ in range(min(length, engine.scheduler.max_model_len - 1))],
            priority=priority if engine.scheduler.policy == "priority" else 0,
            n=n if max_tokens else 1,
            max_tokens=max_tokens,
            prompt_logprobs=None if max_tokens else 0,
            ignore_eos=ignore_eos,
            presence_penalty=penalty,
        )
        self.num_added += 1

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.requests))))

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        requests = self.engine.scheduler.requests.values()
        running = sorted(request.id for request in requests if request.status is RequestStatus.RUNNING)
        if running:
            self.engine.scheduler.preempt(self.engine.requests[data.draw(st.sampled_from(running))])

    @rule()
    def restart(self) -> None:
        self.engine.restart()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()
            assert self.engine.scheduler.cache.usage().num_bytes <= (
                self.engine.layout.num_usable_slabs * self.engine.layout.slab_bytes
            )

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()
            self.engine.check_outputs()
            self.engine.check_drained()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, derandomize=True
)


@pytest.mark.slow
class TestSchedulerMachineLong(SchedulerMachine.TestCase):
    settings = settings(max_examples=500, stateful_step_count=50, deadline=None)
