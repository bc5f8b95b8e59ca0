"""A step that contradicts itself is never made."""

from __future__ import annotations

import pytest

from hybridserve.core.step import ScheduledSequence, ScheduledStep, UnitCopy


def sequence(request_id: str = "a", **changes: object) -> ScheduledSequence:
    fields: dict[str, object] = {
        "start": 4,
        "length": 1,
        "samples": (request_id,),
        "has_state": True,
        "block_ids": (3, 4),
        "state_slot": 2,
    }
    return ScheduledSequence(request_id, **{**fields, **changes})


def test_totals() -> None:
    step = ScheduledStep(0, (sequence("a"), sequence("b", start=0, length=7, has_state=False, samples=())))
    assert step.num_tokens == 8


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "each of them once"),
        ([sequence(), sequence(samples=())], "each of them once"),
        ([sequence("a"), sequence("b", samples=("a",))], "two tokens"),
        ([sequence(length=0)], "not a chunk"),
        ([sequence(start=-1)], "not a chunk"),
        ([sequence(start=0)], "has_state"),
        ([sequence(has_state=False)], "has_state"),
        ([sequence(state_slot=0)], "has_state"),
        ([sequence(state_slot=0, has_state=False, block_ids=())], "no memory"),
    ],
)
def test_contradictions(sequences: list[ScheduledSequence], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduledStep(0, tuple(sequences))


@pytest.mark.parametrize("kind", ["state_copies", "block_copies"])
@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([(1, 2), (3, 2)], "overwrite"),
        ([(1, 2), (2, 3)], "overwrite"),
        ([(1, 0)], "null"),
        ([(0, 1)], "null"),
    ],
)
def test_copies_whose_order_would_matter(kind: str, copies: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduledStep(0, (sequence(),), **{kind: tuple(UnitCopy(*copy) for copy in copies)})
