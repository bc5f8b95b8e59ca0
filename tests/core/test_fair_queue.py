"""Whose turn it is."""

from __future__ import annotations

import pytest

from hybridserve.core.adapter_slots import AdapterSlots
from hybridserve.core.fair_queue import BASE, MAX_NAMES, OTHERS, FairQueue
from hybridserve.core.request import Request, SamplingParams
from hybridserve.core.slabs import IntegrityError


class Queue(FairQueue):
    """Requests by a letter: the adapter's name, or "-" for the base model."""

    def __init__(self, num_slots: int = 26, *, aging: int = 256, **options: object) -> None:
        self.slots = AdapterSlots(num_slots)
        super().__init__(self.slots, **options)
        self.aging = aging
        self.num_added = 0

    def put(self, name: str, level: int = 0) -> Request:
        adapter = None if name == "-" else name
        request = Request(str(self.num_added), [1], SamplingParams(), level, adapter, adapter)
        request.order = (self.num_added + level * self.aging, self.num_added, 0)
        self.num_added += 1
        if (
            adapter is not None
            and adapter not in self.slots
            and len(self.slots.ready_ids) < self.slots.num_slots
        ):
            self.load(adapter)
        self.open(request)
        self.add(request)
        self.check_integrity()
        return request

    def load(self, adapter: str) -> None:
        load = self.slots.begin_load(adapter, 1)
        if load is not None:
            self.slots.finish_load(load.slot, ok=True)
        for changed in self.slots.take_changed():
            self.adapter_changed(changed)

    def next(self, cost: int = 1) -> Request | None:
        """Admit one, charge for it and let it end."""
        request = self.first
        if request is not None:
            self.begin(request)
            self.shares[request.adapter].num_computed_tokens += cost
            self.end(request)
        return request

    def begin(self, request: Request) -> None:
        self.discard(request)
        self.start(request)
        self.check_integrity()

    def end(self, request: Request) -> None:
        self.stop(request)
        self.close(request)
        self.check_integrity()

    def drain(self, cost: int = 1) -> str:
        names = []
        while (request := self.next(cost)) is not None:
            names.append(request.adapter or "-")
        return "".join(names)


def test_one_class_is_served_as_it_came() -> None:
    for options in ({}, {"fair": False}):
        queue = Queue(**options)
        requests = [queue.put("a") for _ in range(5)]
        assert [queue.next() for _ in range(5)] == requests
        assert queue.next() is None
        assert len(queue) == 0


def test_shares_take_turns_by_tokens() -> None:
    queue = Queue()
    for name in "aaaa-bb":
        queue.put(name)
    assert queue.drain() == "a-ba" + "b" + "aa"
    unfair = Queue(fair=False)
    for name in "aaaa-bb":
        unfair.put(name)
    assert unfair.drain() == "aaaa-bb"


def test_who_costs_more_goes_less_often() -> None:
    queue = Queue()
    for name in "aaaabbbbbbbb":
        queue.put(name)
    order = []
    while (request := queue.first) is not None:
        order.append(request.adapter)
        queue.next(cost=3 if request.adapter == "a" else 1)
    assert "".join(order) == "abbbabbbabba"


def test_a_share_that_was_idle_has_no_credit() -> None:
    queue = Queue()
    queue.put("b")
    queue.next(cost=1)
    for _ in range(9):
        queue.put("a")
    for _ in range(5):
        queue.next(cost=100)
    for _ in range(9):
        queue.put("b")
    assert queue.drain(cost=100) == "ab" * 4 + "b" * 5


def test_a_share_that_ran_without_asking_for_more_has_no_credit() -> None:
    queue = Queue()
    running = queue.put("b")
    queue.begin(running)
    for _ in range(9):
        queue.put("a")
    for _ in range(5):
        queue.next(cost=100)
    for _ in range(9):
        queue.put("b")
    assert queue.drain(cost=100) == "ab" * 4 + "b" * 5


def test_a_newcomer_beside_one_that_only_runs_starts_level() -> None:
    queue = Queue()
    running = queue.put("a")
    queue.begin(running)
    queue.shares[running.adapter].num_computed_tokens += 1000
    for name in "bbb":
        queue.put(name)
    for name in "aaa":
        queue.put(name)
    assert queue.drain(cost=10) == "bababa"


def test_going_away_pays_no_debt() -> None:
    queue = Queue()
    waiting = [queue.put(name) for name in "bbbbbb"]
    for _ in range(3):
        request = queue.put("a")
        queue.begin(request)
        queue.shares[request.adapter].num_computed_tokens += 2
        queue.end(request)
    queue.put("a")  # has had 6; is behind all b, who have had nothing
    assert queue.drain() == "bbbbbba"
    assert waiting[-1].adapter == "b"


def test_where_nobody_is_left_nobody_has_a_claim() -> None:
    queue = Queue()
    queue.put("a")
    queue.next(cost=1000)
    for name in "bbabbb":  # b is new
        queue.put(name)
    assert queue.drain(cost=10) == "babbbb"


def test_priority_comes_first_and_equals_share() -> None:
    queue = Queue()
    for name, level in (("a", 1), ("a", 0), ("a", 0), ("b", 1), ("b", 0), ("b", 1)):
        queue.put(name, level)
    order = []
    while (request := queue.next()) is not None:
        order.append(f"{request.adapter}{request.priority}")
    assert order == ["a0", "b0", "a0", "b1", "a1", "b1"]


def test_priority_with_aging() -> None:
    queue = Queue(aging=3)
    patient = queue.put("a", 1)
    for name in "bbbb":
        queue.put(name)
    served = [queue.next() for _ in range(5)]
    assert served.index(patient) == 2  # two that came less than three later went before; as without adapters


def test_what_is_not_ready_stands_in_nobodys_way() -> None:
    queue = Queue(num_slots=1)
    for name in "ab-ba-":
        queue.put(name)
    assert queue.drain() == "a-a-"
    assert queue.first is None
    assert queue.first_unready is not None
    assert queue.first_unready.adapter_id == "b"
    assert len(queue) == 2
    queue.slots.drop("a")
    queue.load("b")
    assert queue.first_unready is None
    assert queue.drain() == "bb"


def test_stop_admitting() -> None:
    queue = Queue()
    for name in "aab":
        queue.put(name)
    queue.stop_admitting("a")
    assert queue.drain() == "b"
    queue.put("a")
    assert queue.first is None
    queue.admit_again("a")
    assert queue.drain() == "aaa"


def test_at_most_so_many_of_a_name_run() -> None:
    queue = Queue(max_running=2)
    a = [queue.put("a") for _ in range(4)]
    b = queue.put("b")
    for expected in (a[0], b, a[1]):
        request = queue.first
        assert request is expected
        queue.begin(request)
        queue.shares[request.adapter].num_computed_tokens += 1
    assert queue.first is None
    assert not queue.may_run(a[2])
    queue.end(a[1])
    assert queue.may_run(a[2])
    assert queue.first is a[2]


def test_one_that_comes_back_goes_before_those_behind_it() -> None:
    queue = Queue()
    first, second, third = (queue.put("a") for _ in range(3))
    queue.begin(first)
    queue.begin(second)
    for request in (second, first):  # preempted
        queue.stop(request)
        queue.add(request)
        queue.check_integrity()
    assert [queue.next() for _ in range(3)] == [first, second, third]


@pytest.mark.parametrize("fair", [True, False])
def test_several_that_come_back(fair: bool) -> None:
    """The last comes back first: what is first in its lane becomes earlier."""
    queue = Queue(fair=fair)
    requests = [queue.put(name) for name in "abaab"]
    for request in requests:
        queue.begin(request)
    for request in reversed(requests):
        queue.stop(request)
        request.num_preemptions += 1
        queue.add(request)
        assert queue.first is request
    if not fair:
        assert [queue.next() for _ in requests] == requests


def test_counters_are_bounded() -> None:
    queue = Queue(num_slots=1200)
    for index in range(1000):
        queue.put(f"n{index}")
        queue.next(cost=2)
    queue.put("-")
    counters = queue.counters()
    assert len(counters) == MAX_NAMES + 1
    assert (
        counters[OTHERS].num_computed_tokens
        + sum(counters[name].num_computed_tokens for name in counters if name != OTHERS)
        == 2 * 1000
    )
    assert counters["n999"] == (0, 0, 1, 2, 0)
    assert counters[BASE] == (0, 1, 0, 0, 0)
    live = [queue.put(f"m{index}") for index in range(100)]  # those with requests are all told
    assert sum(name.startswith("m") for name in queue.counters()) == 100
    for request in live:
        queue.discard(request)
        queue.close(request)
    queue.check_integrity()
    assert len(queue.counters()) == MAX_NAMES + 1
    assert not queue._by_adapter


class Counted(int):
    """Counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.num_compared += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        Counted.num_compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_work_does_not_grow_with_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 adapters wait instead of 10: a request costs a few comparisons more, not a hundred times as
    many."""

    def cost(num_adapters: int, num_slots: int) -> float:
        queue, num_requests = FairQueue(AdapterSlots(num_slots)), 2000
        Counted.num_compared = 0
        for index in range(num_requests):
            name = f"n{index % num_adapters}"
            request = Request(str(index), [1], SamplingParams(), 0, name, None if num_slots == 0 else name)
            request.order = (Counted(index), index, 0)
            queue.open(request)
            queue.add(request)
        while (request := queue.first) is not None:
            queue.discard(request)
            queue.start(request)
            queue.shares[request.adapter].num_computed_tokens += 1
            queue.stop(request)
            queue.close(request)
        if num_slots:
            for _ in range(1000):
                assert queue.first_unready is not None
        return Counted.num_compared / num_requests

    for num_slots in (0, 4):  # all are served; none is ready
        assert cost(1000, num_slots) < 2 * cost(10, num_slots) + 40


@pytest.mark.parametrize("corruption", ["place", "count", "running", "turn", "status", "open"])
def test_check_integrity_sees_corruption(corruption: str) -> None:
    queue = Queue()
    request, _ = queue.put("a"), queue.put("b")
    lane = next(iter(queue.waiting_for("a")))
    match corruption:
        case "place":
            lane.place = None
        case "count":
            queue.shares[request.adapter].num_queued += 1
        case "running":
            queue.shares[request.adapter].num_running += 1
        case "turn":
            lane.share.lanes.clear()
            queue._turns[lane.place].remove(lane)
        case "status":
            lane.requests.add(queue.first)
        case "open":
            queue.shares[request.adapter].num_requests -= 1
    with pytest.raises(IntegrityError):
        queue.check_integrity()


@pytest.mark.parametrize("spoil", ["nothing", "_turns", "_lanes", "_queued", "place", "counts"])
def test_beginning_again_mends_the_books_and_keeps_the_claims(spoil: str) -> None:
    """Whatever a call that did not come to its end has left: only what was served counts."""
    queue = Queue()
    waiting = [queue.put(name) for name in "aab-"]
    running = [queue.put(name) for name in "bc"]
    for request, cost in zip(running, (5, 7), strict=True):
        queue.begin(request)
        queue.shares[request.adapter].num_computed_tokens += cost
    served = {name: share.served for name, share in queue.shares.items()}
    gone = queue.put("d")
    match spoil:
        case "_turns":
            for turns in queue._turns.values():
                turns._by_order._filed.clear()
        case "_queued":
            queue._queued._filed.clear()
        case "place":
            for lane in queue._lanes.values():
                lane.place = None
        case "counts":
            for share in queue.shares.values():
                share.num_queued += 1
                share.num_requests -= 1
        case "_lanes":
            queue._lanes.clear()
    if spoil != "nothing":
        with pytest.raises(IntegrityError):
            queue.check_integrity()
    queue.begin_again([*waiting, *running])
    queue.check_integrity()
    assert len(queue) == 6
    assert {name: queue.shares[name].served for name in served} == served
    assert queue.shares[gone.adapter].num_requests == 0
    assert queue.drain(cost=100) == "a-bcab"
