"""The scheduler's rules, one at a time."""

from __future__ import annotations

import pytest

from hybridserve.core import live_requests
from hybridserve.core.request import FinishReason, Request, RequestStatus, SamplingParams
from hybridserve.core.scheduler import Scheduler
from hybridserve.core.slabs import IntegrityError
from tests.harness.scripted import EOS, ScriptedEngine, alone, toy_layout


def engine(num_slabs: int = 20, depth: int = 1, *, kind: str = "hybrid", **limits: object) -> ScriptedEngine:
    return ScriptedEngine(toy_layout(num_slabs, kind=kind), depth, **limits)


def shares(step: object) -> dict[str, tuple[int, int]]:
    return {sequence.request_id: (sequence.start, sequence.length) for sequence in step.sequences}


# ---- submission


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "prompt: is empty"),
        ([1] * 65, {}, r"prompt: 65 tokens, max_model_len is 64"),
        ([1] * 64, {}, r"prompt: 64 tokens leave no room"),
        ([1] * 40, {}, r"prompt: 40 tokens of prompt.*need 55.*holds 32"),
        ([1] * 20, {"max_tokens": 14}, r"max_tokens: 20 tokens.*14 generated need 33.*holds 32"),
        ([1], {"priority": 1}, r"priority: 1 has no effect"),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(
    prompt: list[int], changes: dict[str, int], message: str
) -> None:
    e = engine(num_slabs=4)
    with pytest.raises(ValueError, match=message):
        e.add("a", prompt, **changes)
    assert not e.scheduler.has_work
    e.add("a", [1] * 20, max_tokens=13)  # exactly what fits: the last token drawn needs no memory
    e.run()
    e.check_outputs()


def test_the_length_limit_counts_towards_what_must_fit() -> None:
    e = engine(num_slabs=4, max_model_len=33)
    e.add("a", [1] * 20, max_tokens=1000, ignore_eos=True)
    e.run()
    assert len(e.requests["a"].output_ids) == 13
    assert e.requests["a"].finish_reason is FinishReason.LENGTH


def test_ids_are_unique_among_those_that_live() -> None:
    e = engine()
    e.add("a", [1, 2, 3], max_tokens=2, n=2, ignore_eos=True)
    with pytest.raises(ValueError, match="request_id: 'a' is in use"):
        e.add("a", [1])
    with pytest.raises(ValueError, match="'#'"):
        e.add("b#1", [1])
    e.step()
    e.scheduler.abort("a")  # its continuation lives on
    with pytest.raises(ValueError, match="request_id: 'a' is in use"):
        e.add("a", [1], n=2)
    e.run()
    e.add("a", [1], n=2)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_below_one(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        engine(**{name: 0})
    with pytest.raises(ValueError, match="policy: 'lifo'"):
        engine(policy="lifo")


# ---- a step


def test_a_step_mixes_decodes_and_chunks_within_the_budget() -> None:
    e = engine(max_num_batched_tokens=8)
    e.add("a", [1] * 6, max_tokens=20, ignore_eos=True)
    e.add("b", [2] * 20, max_tokens=5, ignore_eos=True)
    e.add("c", [3] * 2, max_tokens=5, ignore_eos=True)
    steps = [shares(e.step()) for _ in range(5)]
    assert steps == [
        {"a": (0, 6), "b": (0, 2)},
        {"a": (6, 1), "b": (2, 7)},
        {"a": (7, 1), "b": (9, 7)},
        {"a": (8, 1), "b": (16, 4), "c": (0, 2)},
        {"a": (9, 1), "b": (20, 1), "c": (2, 1)},
    ]
    assert [s.samples for s in e.steps[3].sequences] == [("a",), ("b",), ("c",)]
    assert [s.samples for s in e.steps[2].sequences] == [("a",), ()]
    assert [s.has_state for s in e.steps[3].sequences] == [True, True, False]


def test_a_resumed_long_prompt_leaves_room_for_decodes() -> None:
    e = engine(max_num_batched_tokens=6)
    e.add("old", [1] * 30, max_tokens=5, ignore_eos=True)
    for _ in range(5):
        e.step()
    e.add("young", [2], max_tokens=20, ignore_eos=True)
    e.step()
    e.scheduler.preempt(e.requests["old"])
    e.step()
    assert shares(e.step()) == {"old": (5, 5), "young": (2, 1)}
    e.run()
    e.check_outputs()


def test_every_step_of_a_tiny_budget_advances_the_first() -> None:
    e = engine(max_num_batched_tokens=2)
    for index in range(6):  # F025: six runnable rows, a budget of two
        e.add(f"r{index}", [index + 1] * 3, max_tokens=4, ignore_eos=True)
    e.run()
    assert sum(step.num_tokens for step in e.steps) == 6 * (3 + 3)
    assert len(e.steps) <= 6 * (3 + 3) // 2 + 2
    e.check_outputs()
    e.check_drained()


def test_no_step_is_planned_for_tokens_beyond_the_limits() -> None:
    for depth in (1, 2):
        e = engine(depth=depth, max_model_len=12)
        e.add("a", [1, 2, 3], max_tokens=4, ignore_eos=True)
        e.add("b", [1] * 9, max_tokens=50, ignore_eos=True)  # max_model_len ends it after three
        e.run()
        drawn = [name for step in e.steps for s in step.sequences for name in s.samples]
        assert (drawn.count("a"), drawn.count("b")) == (4, 3)
        e.check_outputs()


def test_first_come_first_served() -> None:
    e = engine(max_num_seqs=1)
    for name in "abc":
        e.add(name, [1], max_tokens=2, ignore_eos=True)
    e.run()
    assert [s.request_id for step in e.steps for s in step.sequences] == ["a", "a", "b", "b", "c", "c"]


def test_a_lower_priority_number_runs_sooner() -> None:
    e = engine(max_num_seqs=1, policy="priority")
    for name, priority in (("late", 1), ("first", -1), ("second", 0), ("third", 0)):
        e.add(name, [1], priority=priority, max_tokens=1)
    e.run()
    assert [s.request_id for step in e.steps for s in step.sequences] == ["first", "second", "third", "late"]


def test_aging_lets_only_so_many_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_requests, "AGING", 8)
    e = engine(max_num_seqs=1, policy="priority")
    e.add("patient", [1], priority=2, max_tokens=1)
    for index in range(3 * 8):
        e.add(f"r{index}", [1], max_tokens=1)
    e.run()
    order = [s.request_id for step in e.steps for s in step.sequences]
    assert order.index("patient") == 2 * 8 - 1


def test_nothing_to_do() -> None:
    e = engine()
    assert e.scheduler.schedule() is None
    assert not e.scheduler.has_work


# ---- memory


def test_admission_leaves_what_running_sequences_will_need() -> None:
    e = engine(num_slabs=4, max_num_batched_tokens=64)  # three slabs: two slots, one slab of four blocks
    e.add("a", [1] * 11, max_tokens=6, ignore_eos=True)  # three blocks
    e.step()
    e.add("b", [2] * 4, max_tokens=1, ignore_eos=True)  # one block, which is there
    assert shares(e.step()) == {"a": (11, 1)}  # but the next token needs it
    while e.scheduler.requests.get("a"):
        e.step()
        assert "b" not in shares(e.steps[-1])
    e.run()
    assert e.scheduler.counters.num_preemptions == 0
    e.check_outputs()


def test_a_fork_leaves_what_running_sequences_will_need() -> None:
    e = engine(num_slabs=5)  # three slots, one slab of four blocks
    e.add("z", [1] * 8, max_tokens=2, ignore_eos=True)  # two blocks, and a third for the next token
    e.add("a", [2] * 3, max_tokens=2, ignore_eos=True, n=2)  # one block; its continuation would take another
    assert shares(e.step()) == {"z": (0, 8), "a": (0, 3)}
    assert shares(e.step()) == {"z": (8, 1), "a": (3, 1)}
    e.run()
    assert (e.scheduler.counters.num_failed_forks, e.scheduler.counters.num_preemptions) == (1, 0)
    e.check_outputs()
    e.check_drained()


def test_admission_leaves_the_rest_of_a_running_prompt() -> None:
    e = engine(num_slabs=4, max_num_batched_tokens=9)
    e.add("a", [1] * 14, max_tokens=2)
    e.add("b", [2] * 3, max_tokens=2)
    e.step()
    assert shares(e.steps[-1]) == {"a": (0, 9)}
    assert shares(e.step()) == {"a": (9, 5)}  # room in the budget, none in memory
    e.run()
    assert e.scheduler.counters.num_preemptions == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_lowest_priority_youngest_is_preempted_and_resumes_first(policy: str) -> None:
    e = engine(num_slabs=6, max_num_batched_tokens=64, policy=policy)
    urgent = {"priority": -1} if policy == "priority" else {}
    e.add("a", [1] * 4, max_tokens=26, ignore_eos=True)
    e.add("b", [2] * 4, max_tokens=20, ignore_eos=True)
    e.add("c", [3] * 4, max_tokens=20, ignore_eos=True, **urgent)
    victims = []
    preempt = e.scheduler.preempt
    e.scheduler.preempt = lambda request: (victims.append(request.id), preempt(request))  # type: ignore[method-assign]
    while not victims:
        e.step()
    e.add("d", [4], max_tokens=2)
    assert victims == (["c"] if policy == "fcfs" else ["b"])
    victim = e.requests[victims[0]]
    assert victim.status is RequestStatus.WAITING
    assert victim.num_computed == 0
    assert len(victim.output_ids) > 0
    assert victim.id in e.steps[-1].finished
    e.run()
    started = [s.request_id for step in e.steps for s in step.sequences if s.start == 0]
    assert started.index("d") > len(started) - 1 - started[::-1].index(victim.id)
    e.check_outputs()
    e.check_drained()


def test_a_preempted_sequence_computes_prompt_and_output_as_one_prompt() -> None:
    e = engine()
    e.add("a", [1] * 5, max_tokens=9, ignore_eos=True)
    for _ in range(4):
        e.step()
    e.scheduler.preempt(e.requests["a"])
    with pytest.raises(ValueError, match="not running"):
        e.scheduler.preempt(e.requests["a"])
    step = e.step()
    sequence = step.sequences[0]
    assert (sequence.start, sequence.length, sequence.has_state, sequence.samples) == (0, 9, False, ("a",))
    assert step.finished == ("a",)
    assert e.step().finished == ()
    e.run()
    assert e.requests["a"].num_preemptions == 1
    e.check_outputs()


def test_ids_whose_memory_is_gone_are_told_once() -> None:
    e = engine()
    e.add("a", [1], max_tokens=1)
    e.add("b", [1, 2], max_tokens=4, ignore_eos=True)
    e.add("w", [1] * 60, max_tokens=4)
    e.step()
    e.abort("w")  # in the step's budget, so it had memory
    e.add("v", [1], max_tokens=3)
    e.abort("v")  # never had any
    assert [e.step().finished for _ in range(3)] == [("a", "w"), (), ()]


# ---- results


def test_an_end_of_sequence_token_and_who_ignores_it() -> None:
    prompt = next(
        [a, b] for a in range(31) for b in range(31) if alone([a, b], SamplingParams(), 0, 64)[-1] == EOS
    )
    e = engine()
    e.add("stops", prompt)
    e.add("ignores", prompt, ignore_eos=True)
    e.add("minimum", prompt, min_tokens=16)
    e.run()
    assert e.requests["stops"].finish_reason is FinishReason.STOP
    assert e.requests["stops"].stop_reason is None
    assert e.requests["stops"].output_ids[-1] == EOS
    assert len(e.requests["ignores"].output_ids) == len(e.requests["minimum"].output_ids) == 16
    assert e.requests["ignores"].finish_reason is FinishReason.LENGTH
    e.check_outputs()


def test_stop_token_ids() -> None:
    outputs = alone([5, 6], SamplingParams(ignore_eos=True), 0, 64)
    stop = next(token for token in outputs[2:] if token not in outputs[:2])
    e = engine()
    e.add("a", [5, 6], ignore_eos=True, stop_token_ids=(stop,))
    e.run()
    request = e.requests["a"]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, stop)
    assert request.output_ids == outputs[: outputs.index(stop) + 1]


def test_no_stop_token_counts_before_min_tokens() -> None:
    planner = Scheduler(
        toy_layout(9), max_num_seqs=1, max_num_batched_tokens=9, max_model_len=9, eos_token_ids=[EOS]
    )
    planner.add(Request("a", [1], SamplingParams(min_tokens=1, stop_token_ids=(5,))))
    ends = []
    for step_id, token in enumerate(
        (5, EOS)
    ):  # a sampler doesn't draw the first; if it did, the text would go on
        assert planner.schedule() is not None
        ends += [event.finish_reason for event in planner.update(step_id, {"a": token})]
    assert ends == [None, FinishReason.STOP]


def test_a_prompt_only_request_ends_without_a_token() -> None:
    e = engine(max_num_batched_tokens=4)
    e.add("a", [1] * 10, max_tokens=0, prompt_logprobs=0)
    e.run()
    assert [len(step.sequences[0].samples) for step in e.steps] == [0, 0, 0]
    assert e.events == [("a", None, FinishReason.LENGTH)]
    e.check_drained()


def test_updates_come_in_order() -> None:
    e = engine(depth=2)
    e.add("a", [1], max_tokens=8, ignore_eos=True)
    first, second = e.plan(), e.plan()
    with pytest.raises(RuntimeError, match="in flight"):
        e.scheduler.schedule()
    with pytest.raises(ValueError, match="step_id"):
        e.scheduler.update(second.step_id, {"a": 1})
    e.finish_step()
    with pytest.raises(ValueError, match="step_id"):
        e.scheduler.update(first.step_id, {"a": 1})
    e.run()


# ---- one step in flight


def test_the_next_step_is_planned_on_a_token_that_is_not_known_yet() -> None:
    e = engine(depth=2)
    request = e.add("a", [1] * 5, max_tokens=8, ignore_eos=True)
    e.plan()
    assert (request.num_computed, request.num_known, request.num_pending) == (5, 5, 1)
    second = e.plan()
    assert shares(second) == {"a": (5, 1)}
    assert (request.num_computed, request.num_tokens, request.num_pending) == (6, 7, 2)
    e.finish_step()
    assert (request.num_known, request.num_pending) == (6, 1)
    e.run()
    e.check_outputs()
    assert len(e.steps) == 8  # no bubble: a step for each token


def test_a_draw_that_looks_at_earlier_tokens_waits_for_them() -> None:
    e = engine(depth=2)
    e.add("a", [1] * 5, max_tokens=4, ignore_eos=True, frequency_penalty=0.5)
    e.add("b", [1] * 4, max_tokens=4, ignore_eos=True)
    e.plan()
    assert shares(e.plan()) == {"b": (4, 1)}
    e.finish_step()
    assert shares(e.plan()) == {"a": (5, 1), "b": (5, 1)}
    e.run()
    e.check_outputs()


def test_a_preempted_sequence_waits_for_the_token_in_flight() -> None:
    e = engine(depth=2)
    request = e.add("a", [1] * 5, max_tokens=8, ignore_eos=True)
    e.plan()
    e.scheduler.preempt(request)
    assert e.plan() is None
    e.finish_step()
    assert len(request.output_ids) == 1
    assert shares(e.plan()) == {"a": (0, 6)}
    e.run()
    e.check_outputs()


def test_a_step_in_flight_delays_a_preemption_by_one_step_not_more() -> None:
    e = engine(num_slabs=6, depth=2, max_num_batched_tokens=64)
    for index, name in enumerate("abc"):
        e.add(name, [index + 1] * 4, max_tokens=18, ignore_eos=True)
    while not e.scheduler.counters.num_preemptions:
        e.step()
    assert e.scheduler.counters.num_preemptions == 1  # not everybody, while the memory is on its way
    e.run()
    e.check_outputs()
    e.check_drained()


# ---- n > 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 8, 9])
@pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
def test_continuations_fork_after_the_prompt(depth: int, num_prompt: int, kind: str) -> None:
    e = engine(num_slabs=40, depth=depth, kind=kind)
    e.add("a", list(range(1, num_prompt + 1)), n=3, max_tokens=6, ignore_eos=True)
    first = e.plan()
    assert first.sequences[0].samples == ("a", "a#1", "a#2")
    child = e.scheduler.requests["a#2"]
    assert (child.parent_id, child.index, child.num_tokens) == ("a", 2, num_prompt + 1)
    if depth == 1:
        e.finish_step()
    second = e.plan()
    assert shares(second) == dict.fromkeys(("a", "a#1", "a#2"), (num_prompt, 1))
    assert len(second.state_copies) == (0 if kind == "kv" else 2)
    assert len(second.block_copies) == (2 if kind != "state" and num_prompt % 4 else 0)
    full = num_prompt // 4 if kind != "state" else 0
    blocks = [sequence.block_ids for sequence in second.sequences]
    assert blocks[0][:full] == blocks[1][:full] == blocks[2][:full]
    assert len({block for ids in blocks for block in ids[full:]}) == sum(len(ids[full:]) for ids in blocks)
    e.run()
    assert e.scheduler.counters.num_forks == 2
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("max_num_seqs", "num_slabs"), [(2, 20), (8, 4)])
def test_continuations_without_room_compute_the_prompt_themselves(
    depth: int, max_num_seqs: int, num_slabs: int
) -> None:
    e = engine(num_slabs=num_slabs, depth=depth, max_num_seqs=max_num_seqs)
    e.add("a", [1, 2, 3, 4, 5], n=4, max_tokens=6, ignore_eos=True)
    e.run()
    assert e.scheduler.counters.num_failed_forks >= 2
    counters, starts = e.scheduler.counters, sum(s.start == 0 for step in e.steps for s in step.sequences)
    assert starts == 1 + counters.num_failed_forks + counters.num_preemptions
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_continuations_of_prompts_that_end_at_once(depth: int, penalty: float) -> None:
    e = engine(num_slabs=60, depth=depth, max_num_batched_tokens=64)
    e.add("one", [1, 2, 3], n=3, max_tokens=1)
    ends = set()
    for token in range(31):
        first = [alone([token, 7], SamplingParams(), index, 64)[0] == EOS for index in range(3)]
        if any(first):
            e.add(f"r{token}", [token, 7], n=3, presence_penalty=penalty)
            ends |= {index for index, at_once in enumerate(first) if at_once}
    assert 0 in ends  # a parent that ends while its children go on
    assert len(ends) > 1
    e.run()
    assert e.scheduler.counters.num_forks > 0
    e.check_outputs()
    e.check_drained()


def test_a_parent_preempted_before_the_fork() -> None:
    e = engine()
    e.add("a", [1, 2, 3], n=3, max_tokens=6, ignore_eos=True)
    e.step()
    e.scheduler.preempt(e.requests["a"])
    e.run()
    assert e.scheduler.counters.num_failed_forks == 2
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("planned", [0, 1, 2])
def test_abort_before_the_first_tokens_are_known_ends_all(planned: int) -> None:
    e = engine(depth=2)
    e.add("a", [1, 2, 3], n=3, max_tokens=6)
    for _ in range(planned):
        e.plan()
    assert [event.request_id for event in e.abort("a")] == (["a", "a#1", "a#2"] if planned else ["a"])
    assert not e.scheduler.has_work
    e.run()
    e.check_drained()


def test_abort_after_the_first_tokens_ends_one() -> None:
    e = engine()
    e.add("a", [1, 2, 3], n=3, max_tokens=6, ignore_eos=True)
    e.step()
    assert [event.request_id for event in e.abort("a")] == ["a"]  # its memory waits for the fork
    assert [event.request_id for event in e.abort("a#2")] == ["a#2"]
    e.run()
    assert e.scheduler.counters.num_forks == 1
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("kind", ["hybrid", "kv", "state"])
def test_who_loses_memory_by_a_restart_is_named(kind: str) -> None:
    e = engine(kind=kind)
    e.add("a", [1, 2, 3], max_tokens=4)
    e.add("b", [4, 5], max_tokens=4)
    e.step()
    e.restart()
    step = e.step()
    assert step is not None
    assert set(step.finished) == {"a", "b"}


def test_a_continuation_that_was_aborted_is_not_born_again() -> None:
    e = engine(depth=2)
    e.add("a", [1, 2, 3], n=3, max_tokens=6, ignore_eos=True)
    e.plan()
    e.abort("a#1")
    e.restart()  # the first tokens are drawn again
    e.run()
    assert e.requests["a#1"].output_ids == []
    assert len(e.requests["a#2"].output_ids) == 6
    e.check_outputs()
    e.check_drained()


def test_memory_of_a_parent_is_not_kept_for_children_that_ended() -> None:
    e = engine()
    e.add("a", [1, 2, 3], n=3, max_tokens=6, ignore_eos=True)
    e.step()
    for name in ("a", "a#1", "a#2"):
        e.abort(name)
    e.check_drained()  # without another step


def test_a_name_used_again_while_an_old_continuation_runs() -> None:
    e = engine(depth=2)
    e.add("a", [1, 2, 3], n=3, max_tokens=20, ignore_eos=True)
    e.step()
    e.step()
    e.abort("a")
    e.abort("a#1")
    old = e.scheduler.requests["a#2"]
    e.scheduler.add(Request("a", [4, 5], SamplingParams(n=2, max_tokens=3, ignore_eos=True)))
    e.step()
    e.scheduler.abort("a#2")
    e.run()
    assert old.finish_reason is FinishReason.ABORT
    e.check_drained()


# ---- the check itself


@pytest.mark.parametrize("corruption", ["lost block", "wrong status", "lost request", "order", "zombie"])
def test_check_integrity_sees_corruption(corruption: str) -> None:
    e = engine(num_slabs=20, max_num_seqs=2)
    for name in "abcd":
        e.add(name, [1] * 5, max_tokens=6, ignore_eos=True)
    e.step()
    request = e.requests["a"]
    match corruption:
        case "lost block":
            request.block_ids = request.block_ids[:-1]
        case "wrong status":
            request.status = RequestStatus.WAITING
        case "lost request":
            e.scheduler._waiting.discard(e.requests["c"])
        case "order":
            request.order = (99, 99, 0)
        case "zombie":
            del e.scheduler._requests["a"]
    with pytest.raises(IntegrityError):
        e.scheduler.check_integrity()


def test_two_schedulers_share_nothing() -> None:
    layout = toy_layout(20)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    one, two = Scheduler(layout, **limits), Scheduler(layout, **limits)
    one.add(Request("a", [1], SamplingParams()))
    assert not two.has_work
    assert one.schedule() is not None
    assert two.cache.usage().num_bytes == 0
