"""What the host does in a step in which each of many sequences decodes a token and nobody comes or goes, in
calls instead of seconds; and that what it keeps from step to step is right, and no other step's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import random
import sys
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hybridserve.core import plan
from hybridserve.core.request import SamplingParams
from hybridserve.core.scheduler import Scheduler
from hybridserve.core.step import ScheduledSequence
from hybridserve.engine.core import EngineCore
from hybridserve.engine.executor import Executor
from hybridserve.engine.input_builder import InputBuilder
from hybridserve.engine.messages import EngineRequest
from hybridserve.engine.model_runner import StepOutput
from tests.harness.scripted import toy_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hybridserve.core.request import Request
    from hybridserve.core.step import ScheduledStep
    from hybridserve.engine.input_builder import BuiltStep, StepInput

BATCH = 64
BLOCK_SIZE = 16


class IdleExecutor(Executor):
    """Draws a token for whoever may have one, and keeps what it was given."""

    def __init__(self, depth: int) -> None:
        self.max_in_flight = depth
        self.steps: list[StepInput] = []
        self._submitted: deque[StepInput] = deque()

    def submit(self, step: StepInput) -> None:
        self.steps.append(step)
        self._submitted.append(step)

    def collect(self) -> StepOutput:
        step = self._submitted.popleft()
        num_draws = 0 if step.sampling is None else len(step.sampling.rows)
        return StepOutput(step_id=step.step_id, token_ids=[7 + step.step_id] * num_draws)

    def reset(self) -> None:
        self._submitted.clear()

    def close(self) -> None:
        return


def make_engine(batch: int, depth: int = 1, buckets: tuple[int, ...] = ()) -> tuple[EngineCore, IdleExecutor]:
    """An engine whose sequences have all begun to decode."""
    scheduler = Scheduler(
        toy_layout(600, block_size=BLOCK_SIZE),
        max_num_seqs=batch,
        max_num_batched_tokens=16 * batch,
        max_model_len=256,
        prefix_caching=True,
        checkpoint_interval=64,
    )
    executor = IdleExecutor(depth)
    builder = InputBuilder(block_size=BLOCK_SIZE, seed=0, buckets=buckets)
    core = EngineCore(scheduler, builder, executor, vocab_size=1000)
    params = SamplingParams(temperature=0.7, max_tokens=60, ignore_eos=True)
    for row in range(batch):
        prompt = [1, 300 + row] + [2] * (row % 3)
        core.add(EngineRequest(request_id=str(row), prompt_ids=prompt, params=params))
    for _ in range(4):
        core.step()
    return core, executor


def count_calls(run: Callable[[], object]) -> Counter[str]:
    """Of functions written in Python ("call") and in C ("c_call")."""
    counts: Counter[str] = Counter()

    def count(frame: object, event: str, argument: object) -> None:
        counts[event] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return counts


def calls_of_a_step(batch: int) -> Counter[str]:
    core, executor = make_engine(batch)
    counts = count_calls(core.step)
    assert executor.steps[-1].query_start.tolist() == list(range(batch + 1))
    assert executor.steps[-1].seq_lens.max() < BLOCK_SIZE  # nobody needs a block
    return counts


def calls_a_sequence() -> dict[str, float]:
    few, many = calls_of_a_step(BATCH), calls_of_a_step(2 * BATCH)
    return {event: (many[event] - few[event]) / BATCH for event in ("call", "c_call")}


def test_a_decode_takes_few_calls_of_the_host() -> None:
    """Four functions written in Python: what can be computed, a share of the step, whether the token ends it,
    what it gained. In C: `len` and `append`, mostly."""
    calls = calls_a_sequence()
    assert calls["call"] <= 4
    assert calls["c_call"] <= 18


def test_what_is_counted_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NamedTuple made by calling its class, as it once was."""
    monkeypatch.setattr(plan, "_sequence", lambda fields: ScheduledSequence(*fields))
    assert calls_a_sequence()["call"] > 4


def arrays(value: Any) -> Iterator[tuple[str, np.ndarray]]:
    """All that a step's input or a part of it consists of, by name."""
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if isinstance(part, np.ndarray):
            yield field.name, part
        elif dataclasses.is_dataclass(part):
            yield from arrays(part)


def assert_same(one: StepInput, other: StepInput) -> None:
    theirs = dict(arrays(other))
    for name, array in arrays(one):
        assert array.dtype == theirs[name].dtype, name
        assert array.tolist() == theirs[name].tolist(), (one.step_id, name)


@pytest.mark.parametrize("buckets", [(), (8, 16)])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_in_flight_keeps_its_arrays(
    depth: int, buckets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, executor = make_engine(5, depth, buckets)
    as_built: list[StepInput] = []
    build = core._builder.build

    def noting(*args: Any) -> BuiltStep:
        built = build(*args)
        as_built.append(copy.deepcopy(built.input))
        return built

    monkeypatch.setattr(core._builder, "build", noting)
    del executor.steps[:]
    while core.has_work:
        core.step()
    assert len(as_built) == len(executor.steps) > 50
    for step, before in zip(executor.steps, as_built, strict=True):
        assert_same(step, before)
    for step, following in itertools.pairwise(executor.steps):
        later = [array for _, array in arrays(following)]
        for name, array in arrays(step):
            assert not any(np.shares_memory(array, one) for one in later), name


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_between_steps_changes_nothing(
    seed: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences come, share prefixes, fork, give way and go: every step is what a new builder makes of it."""
    rng = random.Random(seed)
    core, _ = make_engine(6, depth, (8, 16))
    build = core._builder.build

    def checking(step: ScheduledStep, requests: Mapping[str, Request]) -> BuiltStep:
        fresh = InputBuilder(block_size=BLOCK_SIZE, seed=0, buckets=(8, 16))
        fresh._previous_rows = dict(core._builder._previous_rows)
        built = build(step, requests)
        expected = fresh.build(step, requests)
        assert_same(built.input, expected.input)
        assert built.sample_ids == expected.sample_ids
        return built

    monkeypatch.setattr(core._builder, "build", checking)
    common = [rng.randrange(900) for _ in range(100)]
    for number in range(120):
        if rng.random() < 0.3:
            params = SamplingParams(
                n=rng.choice([1, 1, 2]),
                max_tokens=rng.randrange(1, 30),
                top_k=rng.choice([0, 5]),
                min_tokens=1,
                ignore_eos=True,
            )
            prompt = [*common[: rng.randrange(1, 100)], rng.randrange(900)]
            if (name := f"r{number % 7}") not in core._live:  # ids come again
                with contextlib.suppress(ValueError):  # one of its continuations is still there
                    core.add(EngineRequest(request_id=name, prompt_ids=prompt, params=params))
        if rng.random() < 0.1:
            core.abort(rng.choice(list(core._live) or ["nobody"]))
        if rng.random() < 0.1 and core.scheduler.num_running:
            core.scheduler.preempt(core.scheduler._running.last)
        core.step()
    assert core.stats.num_finished_sequences > 20
    assert core.scheduler.counters.num_preemptions > 2
    assert core.scheduler.counters.num_forks > 0
