"""What rank 0 tells the others: every message, whole and in order; adapters in pieces, and one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.engine.channel import MAX_ROOM, Kind
from tests.distributed import channel_work as work

if TYPE_CHECKING:
    from tests.distributed.harness import RankPool


def test_messages_of_any_size(ranks: RankPool) -> None:
    sizes = [0, 8, 4096, 4104, 70_000, 3, MAX_ROOM, MAX_ROOM + 8, 1 << 20, 16, 0]
    messages = [(int(Kind.STEP), size) for size in sizes] + [(int(Kind.PLACE), 24), (int(Kind.CLOSE), 0)]
    results = ranks.run(2, 1, work.pass_messages, messages)
    assert results[1][0] == [(kind, work.payload(size)) for kind, size in messages]


def test_a_step_like_the_one_before_takes_one_broadcast(ranks: RankPool) -> None:
    """Little more than the bytes of the step; and what isn't a step doesn't change that."""
    steady = [(int(Kind.STEP), 70_000), (int(Kind.CLEAR), 8)]
    (_, few), _ = ranks.run(2, 1, work.pass_messages, steady * 2)
    (_, more), _ = ranks.run(2, 1, work.pass_messages, steady * 4)
    a_pair = (more - few) / 2
    assert a_pair < 2 * (70_000 * 9 / 8 + 4096 + 64)


def test_a_missed_message_is_noticed(ranks: RankPool) -> None:
    assert ranks.run(2, 1, work.miss_a_message) == ["", "expected message 1 of rank 0, got message 0"]


def test_answers(ranks: RankPool) -> None:
    sizes = [8, 100_000, 16]
    assert ranks.run(1, 2, work.answer, sizes)[0] == [work.payload(size) for size in sizes]


def test_an_adapter_arrives_as_it_was(ranks: RankPool) -> None:
    mine, other = ranks.run(2, 1, work.deliver, [None, None])
    adapter = work.make_adapter()
    assert mine["verdict"] is other["verdict"] is None
    assert mine["num_pauses"] == 4  # of 4 MiB: 12 MiB, and a little more
    assert other["number"] == 41
    assert other["facts"] == ("id", "/some/where", 3, (7, 8))
    assert other["shared"] == 1
    for name, delta in adapter.deltas.items():
        A, B, scale, bias, magnitude = other["deltas"][name]
        assert scale == delta.scale
        for got, sent in ((A, delta.A), (B, delta.B), (bias, delta.bias), (magnitude, delta.magnitude)):
            assert (got is None) == (sent is None)
            if sent is not None:
                assert got.dtype == sent.dtype
                assert torch.equal(got, sent)


@pytest.mark.parametrize(
    ("refusals", "verdict"),
    [([None, "too large"], "too large"), (["mine", "yours"], "mine"), ([None, "ü" * 600], "ü" * 256)],
)
def test_all_ranks_take_an_adapter_or_none(refusals: list[str | None], verdict: str, ranks: RankPool) -> None:
    assert [result["verdict"] for result in ranks.run(2, 1, work.deliver, refusals)] == [verdict] * 2
