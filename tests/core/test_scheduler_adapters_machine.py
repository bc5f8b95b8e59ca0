"""Anything may happen at any time to requests with adapters: loads end or fail, adapters are pinned and
dropped, steps are lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridserve.core.request import RequestStatus
from tests.harness.scripted import VOCAB, ScriptedEngine, toy_layout

VERSIONS = [f"{name}-{version}" for name in "abcd" for version in (1, 2)]


class AdapterMachine(RuleBasedStateMachine):
    """The engine checks each step and the device's bytes, the scheduler its own books; and tokens depend on
    the adapter that is in the slot when a step runs."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        num_slots = data.draw(st.integers(1, 3))
        device_bytes = data.draw(st.sampled_from([None, 5, 9]))
        policy = data.draw(st.sampled_from(["fcfs", "priority"]))
        self.engine = ScriptedEngine(
            toy_layout(data.draw(st.integers(5, 14))),
            depth=data.draw(st.sampled_from([1, 2])),
            num_slots=num_slots,
            device_bytes=device_bytes,
            adapter_bytes={adapter_id: 1 + index % 5 for index, adapter_id in enumerate(VERSIONS)},
            auto_load=False,
            max_num_seqs=data.draw(st.integers(1, 6)),
            max_num_batched_tokens=data.draw(st.integers(1, 20)),
            max_model_len=32,
            policy=policy,
            fair_share=data.draw(st.booleans()),
            max_running_per_adapter=data.draw(st.sampled_from([None, None, 1, 2])),
        )
        self.num_added = 0

    @rule(
        seed=st.integers(0, 2**16),
        length=st.integers(1, 10),
        adapter=st.sampled_from([None, "a", "a", "b", "c", "d"]),
        version=st.sampled_from([1, 1, 1, 2, None]),
        adapter_start=st.sampled_from([0, 0, 3]),
        priority=st.integers(-2, 2),
        n=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.sampled_from([0, 1, 2, 6]),
        ignore_eos=st.booleans(),
        penalty=st.sampled_from([0.0, 0.0, 0.5]),
    )
    def add(
        self,
        seed: int,
        length: int,
        adapter: str | None,
        version: int | None,
        adapter_start: int,
        priority: int,
        n: int,
        max_tokens: int,
        ignore_eos: bool,
        penalty: float,
    ) -> None:
        engine, rng = self.engine, random.Random(seed)
        try:
            engine.add(
                f"r{self.num_added}",
                [rng.randrange(VOCAB) for _ in range(length)],
                priority=priority if engine.scheduler.policy == "priority" else 0,
                adapter=adapter,
                version=version,
                adapter_start=adapter_start,
                n=n if max_tokens else 1,
                max_tokens=max_tokens,
                prompt_logprobs=None if max_tokens else 0,
                ignore_eos=ignore_eos,
                presence_penalty=penalty,
            )
        except ValueError as error:
            assert "pinned adapters included" in str(error)  # noqa: PT017 (most are accepted)
        self.num_added += 1

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine.loading)
    @rule(index=st.integers(0, 2), ok=st.sampled_from([True, True, True, False]))
    def finish_load(self, index: int, ok: bool) -> None:
        self.engine.finish_load(index % len(self.engine.loading), ok=ok)

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

    @rule(adapter_id=st.sampled_from(VERSIONS))
    def drop(self, adapter_id: str) -> None:
        self.engine.drop(adapter_id)

    @precondition(lambda self: self.engine.scheduler.adapters.ready_ids)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from(self.engine.scheduler.adapters.ready_ids))
        try:
            self.engine.scheduler.pin_adapter(adapter_id)
        except ValueError as error:
            assert "pin the last" in str(error) or "no room beside its" in str(error)  # noqa: PT017

    @rule(adapter_id=st.sampled_from(VERSIONS))
    def unpin(self, adapter_id: str) -> None:
        self.engine.scheduler.adapters.unpin(adapter_id)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "engine"):
            scheduler = self.engine.scheduler
            scheduler.check_integrity()
            counters = scheduler.adapter_counters().values()
            assert sum(one.num_running for one in counters) == scheduler.num_running
            assert sum(one.num_waiting for one in counters) == scheduler.num_waiting

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.auto_load = True
            self.engine.run()
            self.engine.check_outputs()
            self.engine.check_drained()
            for adapter_id in VERSIONS:
                self.engine.drop(adapter_id)
            assert self.engine.device == {}
            assert self.engine.scheduler.adapters.num_bytes == 0


TestAdapterMachine = AdapterMachine.TestCase
TestAdapterMachine.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True
)


@pytest.mark.slow
class TestAdapterMachineLong(AdapterMachine.TestCase):
    settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
