"""The machine of test_scheduler_machine with the prefix cache on: few different tokens, so that much is
shared, adapters, salts, little memory, in the arena and on the host."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridserve.core.request import RequestStatus
from tests.harness.machines import drawn_engine

MAX_MODEL_LEN = 60
NUM_SLABS = {"hybrid": (6, 24), "kv": (16, 40), "state": (3, 14)}


class PrefixMachine(RuleBasedStateMachine):
    """A request that began with a wrong state, or with blocks that somebody wrote to, draws other tokens."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.engine = drawn_engine(
            data,
            num_slabs=NUM_SLABS,
            max_model_len=MAX_MODEL_LEN,
            most_tokens=40,
            num_slots=2,
            prefix_caching=True,
            checkpoint_interval=data.draw(st.sampled_from([0, 4, 8, 16])),
        )
        self.num_added = 0

    @rule(
        seed=st.integers(0, 3),
        length=st.integers(1, 30),
        more=st.lists(st.integers(0, 1), max_size=6),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.sampled_from([0, 1, 2, 6, 30]),
        adapter=st.sampled_from([None, None, None, ("A", 0), ("B", 0), ("A", 6), ("A", 8)]),
        salt=st.sampled_from([None, None, None, "tenant"]),
        penalty=st.sampled_from([0.0, 0.0, 0.5]),
    )
    def add(
        self,
        seed: int,
        length: int,
        more: list[int],
        n: int,
        max_tokens: int,
        adapter: tuple[str, int] | None,
        salt: str | None,
        penalty: float,
    ) -> None:
        engine, rng = self.engine, random.Random(seed)
        prompt = [rng.randrange(2) for _ in range(length)] + more
        name, start = adapter or (None, 0)
        engine.add(
            f"r{self.num_added}",
            prompt[: engine.scheduler.max_model_len - 1],
            n=n if max_tokens else 1,
            max_tokens=max_tokens,
            prompt_logprobs=None if max_tokens else 0,
            ignore_eos=True,
            presence_penalty=penalty,
            adapter=name,
            adapter_start=start,
            cache_salt=salt,
        )
        self.num_added += 1

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def next_turn(self, data: st.DataObject, more: list[int]) -> None:
        """Somebody comes back with what was said, and something new."""
        engine = self.engine
        before = engine.requests[data.draw(st.sampled_from(sorted(engine.requests)))]
        prompt = [*before.prompt_ids, *before.output_ids, *more]
        engine.add(
            f"r{self.num_added}",
            prompt[: engine.scheduler.max_model_len - 1],
            max_tokens=5,
            ignore_eos=True,
            adapter=before.adapter,
            adapter_start=before.adapter_start,
            cache_salt=before.cache_salt,
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

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        self.engine.scheduler.distrust(data.draw(st.sampled_from(sorted(self.engine.requests))))

    @rule()
    def restart(self) -> None:
        self.engine.restart()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()
            self.check_counts()

    def check_counts(self) -> None:
        """Each prompt is counted once, when it first begins, and each of its tokens with it."""
        counters = self.engine.scheduler.cache.prefix.counters
        num_found = sum(counters.hit_tokens.values())
        assert num_found + sum(counters.missed_tokens.values()) == counters.num_queried_tokens
        assert all(count >= 0 for count in counters.missed_tokens.values())
        requests = self.engine.requests.values()
        begun = [r for r in requests if r.parent_id is None and (r.num_computed or r.num_preemptions)]
        assert counters.num_queried_tokens == sum(request.num_prompt for request in begun)
        for request in requests:
            limit = 0 if request.parent_id is not None else request.num_prompt - 1
            assert request.num_cached <= limit
        assert num_found == sum(request.num_cached for request in requests)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()
            self.engine.check_outputs()
            self.engine.check_drained()


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)


@pytest.mark.slow
class TestPrefixMachineLong(PrefixMachine.TestCase):
    settings = settings(max_examples=500, stateful_step_count=60, deadline=None)
