"""When requests are sent, and what is written down of each: in virtual time, exactly."""

from __future__ import annotations

import asyncio
import itertools
import statistics

import pytest

from hybridserve.bench.load import ClosedLoop, OpenLoop, Run
from hybridserve.bench.record import measure
from hybridserve.bench.target import Arrival, RequestFailed, TargetRequest
from hybridserve.bench.workloads import Conversation, Turn
from tests.harness.bench_targets import ScriptedTarget, end, run_in_virtual_time, steady, tokens

ENDLESS = itertools.repeat(Conversation((Turn([1, 2, 3], 4),)))


def go(target, load, count=None, **options):
    run = Run(target, **options)
    conversations = ENDLESS if count is None else itertools.islice(ENDLESS, count)
    run_in_virtual_time(run.go(conversations, load))
    return run


def sent(target):
    return [time for time, _ in target.seen]


def test_one_request():
    target = ScriptedTarget(
        lambda _: [(0.5, tokens(1)), (0.2, tokens(3)), (0.1, tokens(1)), (0.05, end(3, 5, 2))]
    )

    async def work():
        await asyncio.sleep(10)
        return await measure(target, TargetRequest([1, 2, 3]), due=9.5, limit=None)

    record = run_in_virtual_time(work())
    assert (record.due, record.start) == (9.5, 10.0)
    assert record.ttft == pytest.approx(0.5)
    assert record.e2e == pytest.approx(0.85)
    assert record.intervals() == [(pytest.approx(0.2), 3), (pytest.approx(0.1), 1)]
    assert record.usage == (3, 5, 2)
    assert record.finish_reason == "length"
    assert record.is_ok


@pytest.mark.parametrize(
    ("steps", "kind", "seconds"),
    [
        ([(1.0, tokens(1)), (1.0, RequestFailed("HTTP 429", "full"))], "HTTP 429", 2.0),
        ([(1.0, tokens(1)), (100.0, tokens(1))], "timeout", 5.0),
        ([(1.0, tokens(1))], "protocol", 1.0),
        ([(1.0, end(3, 2))], "protocol", 1.0),
    ],
)
def test_failures_are_written_down(steps, kind, seconds):
    target = ScriptedTarget(lambda _: steps)
    record = run_in_virtual_time(measure(target, TargetRequest([1]), due=0.0, limit=5.0))
    assert record.error.kind == kind
    assert record.e2e == seconds
    assert target.num_running == 0


def test_closed_loop_keeps_so_many_running():
    target = ScriptedTarget(steady(0.25))
    run = go(target, ClosedLoop(3), 9)
    assert target.most_running == 3
    assert sent(target) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [record.start - record.due for record in run.records] == [0] * 9
    assert run.num_running == 0


def test_closed_loop_sends_the_next_when_one_ends():
    durations = iter([1.0, 5.0, 1.0, 1.0, 1.0])
    target = ScriptedTarget(lambda _: [(next(durations), tokens(1)), (0.0, end(3, 1))])
    go(target, ClosedLoop(2), 5)
    assert sent(target) == [0, 0, 1, 2, 3]


def test_open_loop_does_not_wait_for_answers():
    target = ScriptedTarget(steady(10.0))
    go(target, OpenLoop(4.0, "constant", 0), 8)
    assert sent(target) == pytest.approx([number / 4 for number in range(8)])
    assert target.most_running == 8


def test_poisson_arrivals():
    """Gaps are exponential: their mean is 1 / rate, their deviation too, and counts of equal windows have a
    variance as large as their mean."""
    target = ScriptedTarget(steady(0.0))
    go(target, OpenLoop(50.0, "poisson", 7), 5000)
    times = sent(target)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.07)
    windows = [0] * int(times[-1])
    for time in times:
        if time < len(windows):
            windows[int(time)] += 1
    assert statistics.variance(windows) == pytest.approx(50, rel=0.4)


def test_arrivals_repeat_by_seed():
    def gaps(seed):
        return list(itertools.islice(OpenLoop(1.0, "poisson", seed).gaps(), 20))

    assert gaps(1) == gaps(1)
    assert gaps(1) != gaps(2)


@pytest.mark.parametrize("load", [ClosedLoop(2), OpenLoop(2.0, "constant", 0)])
def test_duration_ends_the_sending_not_the_answers(load):
    target = ScriptedTarget(steady(0.25))
    run = go(target, load, duration=3.0)
    assert sent(target) == pytest.approx(
        [0, 0, 1, 1, 2, 2] if load == ClosedLoop(2) else [0, 0.5, 1, 1.5, 2, 2.5]
    )
    assert all(record.is_ok for record in run.records)
    assert len(run.records) == 6


def converse(target, *contents, **options):
    conversation = Conversation(tuple(Turn(content, 2) for content in contents), adapter="a")
    run = Run(target, **options)
    run_in_virtual_time(run.go([conversation], ClosedLoop(1)))
    return run


def test_turns_of_ids_hold_the_history():
    answer = Arrival("x", 1, 2, [70, 71])
    target = ScriptedTarget(lambda request: [(1.0, answer), (0.0, end(len(request.prompt), 2))])
    run = converse(target, [1, 2], [3], [4], think=0.5)
    assert [request.prompt for _, request in target.seen] == [
        [1, 2],
        [1, 2, 70, 71, 3],
        [1, 2, 70, 71, 3, 70, 71, 4],
    ]
    assert sent(target) == [0.0, 1.5, 3.0]
    assert [record.turn for record in run.records] == [0, 1, 2]
    assert {request.adapter for _, request in target.seen} == {"a"}


def test_turns_of_text_hold_the_history():
    target = ScriptedTarget(lambda _: [(0.0, tokens(1, text=" yes")), (0.0, end(3, 1))])
    converse(target, "one", " two")
    assert target.seen[1][1].prompt == "one yes two"


def test_turns_of_a_chat_hold_the_history():
    target = ScriptedTarget(
        lambda _: [(0.0, tokens(1, text="ye")), (0.1, tokens(1, text="s")), (0.0, end(3, 2))]
    )
    converse(target, [{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}])
    assert target.seen[1][1].prompt == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "two"},
    ]


def test_a_failed_turn_ends_its_conversation():
    target = ScriptedTarget(lambda _: [(0.0, RequestFailed("HTTP 503", ""))])
    run = converse(target, "one", "two", "three")
    assert (len(run.records), run.num_skipped) == (1, 2)


def test_cancelled_requests_are_closed_and_leave_no_record():
    target = ScriptedTarget(steady(1.0))
    run = Run(target)

    async def work():
        task = asyncio.create_task(run.go(ENDLESS, ClosedLoop(3)))
        await asyncio.sleep(6.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_in_virtual_time(work())
    assert len(run.records) == 3
    assert target.num_running == run.num_running == 0


def test_watch_is_called():
    seen = []
    go(
        ScriptedTarget(steady(0.5)),
        ClosedLoop(2),
        2,
        watch=lambda run: seen.append((run.num_running, len(run.records))),
    )
    assert seen == [(1, 0), (2, 0), (1, 1), (0, 2)]
