"""Two steps in flight over several ranks, as where they have GPUs: the second is launched before anybody has
seen what the first draws, and is right whatever has become of the first meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hybridserve.core.request import FinishReason, SamplingParams
from hybridserve.distributed.failure import RankFailure
from hybridserve.engine.executors import RanksExecutor
from hybridserve.engine.staging import PinnedStaging
from tests.distributed.engines import GREEDY, add, all_gone, engine, finish, rank_processes, steps, tokens
from tests.harness.adapters import Kit
from tests.harness.engine import make_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.engine.core import EngineCore
    from tests.distributed.engines import Outputs

PROMPTS = make_prompts([3, 40, 7, 21, 12, 33], vocab_size=128)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True, top_k=50, top_p=0.9, n=2),
    SamplingParams(temperature=0.8, seed=1, max_tokens=16, ignore_eos=True, logit_bias={5: 3.0}),
    SamplingParams(temperature=0, max_tokens=14, presence_penalty=1.0, repetition_penalty=1.2, logprobs=0),
    SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
]
ADAPTERS = [None, "A", None, "B", "A", None]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    kit = Kit(tmp_path_factory.mktemp("kit"))
    for name in ("A", "B"):
        kit.adapter(name)
    return kit


def options(kit: Kit) -> dict[str, object]:
    adapters = {name: str(kit.adapter(name)) for name in ("A", "B")}
    return {"max_num_batched_tokens": 24, "max_loaded": 1, "adapters": adapters}


@pytest.fixture(scope="module")
def expected(kit: Kit) -> dict[str, list[list[int]]]:
    with engine(kit.base, **options(kit)) as core:
        return answers(run_all(core))


@pytest.fixture(
    scope="module",
    params=[(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.slow)],
    ids=lambda sizes: f"tensor {sizes[0]} pipeline {sizes[1]}",
)
def core(kit: Kit, request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    tensor, pipeline = request.param
    with engine(kit.base, tensor=tensor, pipeline=pipeline, **options(kit)) as core:
        yield two_in_flight(core)


def two_in_flight(core: EngineCore) -> EngineCore:
    assert isinstance(core.executor, RanksExecutor)
    assert core.executor.max_in_flight == 1  # a CPU has run a step when it was launched
    core.executor.max_in_flight = 2
    return core


def run_all(core: EngineCore) -> Outputs:
    for index, (prompt, params, adapter) in enumerate(zip(PROMPTS, PARAMS, ADAPTERS, strict=True)):
        add(core, f"r{index}", prompt, params, adapter=adapter)
    return finish(core)


def answers(outputs: Outputs) -> dict[str, list[list[int]]]:
    """By request: the tokens of each of its continuations."""
    return {
        name: [tokens([o for o in found if o.index == index]) for index in sorted({o.index for o in found})]
        for name, found in outputs.items()
    }


def test_the_answers_are_those_of_one(
    core: EngineCore, expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of drawing, prompts in chunks, adapters that wait for a slot, one sequence that ends at its
    first token; and everything that rank 0 puts goes through small buffers."""
    runner = core.executor._ranks.worker.runner
    monkeypatch.setattr(runner, "_staging", PinnedStaging(runner._queue, 256))
    num_pending = []
    submit = core.executor.submit

    def submitted(step):
        num_pending.append(len(step.pending))
        submit(step)

    monkeypatch.setattr(core.executor, "submit", submitted)
    assert answers(run_all(core)) == expected
    assert sum(num > 0 for num in num_pending) > 10, "tokens that nobody had seen"


def test_preempted_and_aborted_while_a_step_is_ahead(
    core: EngineCore, expected: dict[str, list[list[int]]]
) -> None:
    for index, (prompt, params, adapter) in enumerate(zip(PROMPTS, PARAMS, ADAPTERS, strict=True)):
        add(core, f"r{index}", prompt, params, adapter=adapter)
    add(core, "gone", PROMPTS[3], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    outputs = steps(core, 9)
    assert len(core._in_flight) == 1
    core.abort("gone")
    core.scheduler.preempt(core.scheduler.requests["r0"])
    add(core, "late", PROMPTS[0])
    finish(core, outputs)
    assert outputs.pop("gone")[-1].finish_reason == FinishReason.ABORT
    assert tokens(outputs.pop("late")) == expected["r0"][0]
    assert answers(outputs) == expected


def test_an_interrupt_drops_both(core: EngineCore, expected: dict[str, list[list[int]]], monkeypatch) -> None:
    """Ctrl-C before a result is asked for, and when it was: what was launched runs to its end on all ranks,
    and what is computed again is the same."""
    collect, ranks = core.executor.collect, core.executor._ranks
    num_calls = 0

    def interrupted():
        nonlocal num_calls
        num_calls += 1
        if num_calls in (2, 3, 7):
            raise KeyboardInterrupt
        if num_calls in (5, 9):
            core.executor._result = ranks.finish()
            raise KeyboardInterrupt
        return collect()

    monkeypatch.setattr(core.executor, "collect", interrupted)
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        add(core, f"r{index}", prompt, params, adapter=ADAPTERS[index])
    outputs: Outputs = {}
    while core.has_work:
        try:
            steps(core, 1, outputs)
        except KeyboardInterrupt:
            continue
    assert num_calls > 9
    assert answers(outputs) == expected
    assert not ranks._launched


def test_draws_that_a_rank_does_not_hear_of_are_seen(kit: Kit) -> None:
    found = []
    for fault in ("deaf", "none"):
        with engine(kit.base, fault=fault, tensor=2) as core:
            add(two_in_flight(core), "r", PROMPTS[2])
            found.append(tokens(finish(core)["r"]))
    assert found[0] != found[1]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("raise", "ZeroDivisionError: a fault of this test"), ("exit", "ended with status 17")],
)
def test_a_rank_that_fails(fault: str, reason: str, sizes: tuple[int, int], kit: Kit) -> None:
    """Both steps are lost, and all that had begun."""
    others = rank_processes()
    with engine(kit.base, fault=fault, tensor=sizes[0], pipeline=sizes[1]) as core:
        processes = [process for process in rank_processes() if process not in others]
        add(two_in_flight(core), "r0", PROMPTS[0])
        add(core, "r1", PROMPTS[2])
        with pytest.raises(RankFailure, match=rf"^rank 1 .*{reason}"):
            finish(core)
        assert {output.finish_reason for output in core.step()} == {FinishReason.ABORT}
        assert all_gone(processes)


def test_ranks_that_are_started_again(kit: Kit) -> None:
    others = rank_processes()
    with engine(kit.base, can_restart=True, tensor=2) as core:
        add(two_in_flight(core), "r", PROMPTS[2])
        expected = tokens(finish(core)["r"])
        add(core, "lost", PROMPTS[2])
        steps(core, 4)
        next(process for process in rank_processes() if process not in others).kill()
        with pytest.raises(RankFailure):
            finish(core)
        core.step()
        add(core, "again", PROMPTS[2])
        assert tokens(finish(core)["again"]) == expected
