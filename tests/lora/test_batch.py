"""The descriptor of a step's adapters, against a definition row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hybridserve.kernels.lora.interface import CHUNK_ROWS, LoraBatch, Segment
from hybridserve.lora.batch import make_batch, select

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = torch.device("cpu")


def describe(
    slots: Sequence[int], lengths: Sequence[int], starts: Sequence[int], begins: Sequence[int] | None = None
) -> tuple[LoraBatch | None, list[int]]:
    """The batch of sequences of these lengths that are at position `begins`; and each row's slot."""
    begins = begins or [0] * len(slots)
    positions = [begin + i for begin, length in zip(begins, lengths, strict=True) for i in range(length)]
    batch = make_batch(
        np.array(slots, dtype=np.int64),
        np.array(starts, dtype=np.int64),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.array(positions, dtype=np.int64),
        CPU,
    )
    row_slots = [
        slot if begin + i >= start else 0
        for slot, length, start, begin in zip(slots, lengths, starts, begins, strict=True)
        for i in range(length)
    ]
    return batch, row_slots


def check(batch: LoraBatch | None, row_slots: Sequence[int]) -> None:
    if not any(row_slots):
        assert batch is None
        return
    assert batch is not None
    assert batch.row_slots.tolist() == batch.host_row_slots.tolist() == list(row_slots)
    order = sorted((slot, row) for row, slot in enumerate(row_slots) if slot)
    assert batch.rows.tolist() == [row for _, row in order]
    covered = []
    for slot, start, stop in batch.segments:
        assert start < stop
        assert {s for s, _ in order[start:stop]} == {slot}
        covered += range(start, stop)
    assert covered == list(range(len(order)))
    assert [s.slot for s in batch.segments] == sorted(batch.slots) == sorted(set(row_slots) - {0})
    assert batch.chunks.dtype == torch.int32
    covered = []
    for slot, start, count in batch.chunks.tolist():
        assert 0 < count <= CHUNK_ROWS
        assert {s for s, _ in order[start : start + count]} == {slot}
        covered += range(start, start + count)
    assert covered == list(range(len(order)))
    assert batch.rows.is_contiguous()
    assert batch.chunks.is_contiguous()


def test_nobody_has_an_adapter() -> None:
    assert describe([0, 0], [3, 1], [0, 0])[0] is None
    assert describe([], [], [])[0] is None


def test_l009_ids_that_come_in_any_order() -> None:
    batch, row_slots = describe([1, 2, 3, 2, 3, 2, 3, 3], [1] * 8, [0] * 8)
    check(batch, row_slots)
    assert batch is not None
    assert batch.rows.tolist() == [0, 1, 3, 5, 2, 4, 6, 7]
    assert batch.segments == [Segment(1, 0, 1), Segment(2, 1, 4), Segment(3, 4, 8)]


def test_an_adapter_is_on_from_its_start() -> None:
    """Per row, not per sequence: a chunk may begin before it, at it, behind it or end before it."""
    batch, row_slots = describe([2, 2, 2, 2, 1], [4, 4, 4, 3, 1], [6, 6, 6, 6, 0], [4, 6, 8, 1, 9])
    check(batch, row_slots)
    assert row_slots == [0, 0, 2, 2] + [2] * 8 + [0] * 3 + [1]
    assert describe([2], [3], [6], [3])[0] is None


def test_long_segments_are_cut_into_chunks() -> None:
    batch, row_slots = describe([3, 0, 1], [2 * CHUNK_ROWS + 1, 5, CHUNK_ROWS], [0, 0, 0])
    check(batch, row_slots)
    assert batch is not None
    assert batch.chunks[:, 2].tolist() == [CHUNK_ROWS, CHUNK_ROWS, CHUNK_ROWS, 1]


@pytest.mark.parametrize("seed", range(20))
def test_l014_batches_that_grow_and_shrink(seed: int) -> None:
    """Nothing of one step is left in the next, and nothing of the next changes the one before."""
    rng = np.random.default_rng(seed)
    before: tuple[LoraBatch | None, list[int]] = (None, [])
    for _ in range(20):
        count = int(rng.integers(1, 20))
        slots = rng.integers(0, 5, count) * (rng.random() < 0.8)
        lengths = rng.choice([1, 1, 1, 2, 7, 40], count)
        starts, begins = rng.integers(0, 12, count), rng.integers(0, 12, count)
        now = describe(slots.tolist(), lengths.tolist(), starts.tolist(), begins.tolist())
        check(*now)
        check(*before)
        before = now


@pytest.mark.parametrize("seed", range(5))
def test_selected_rows_in_the_order_given(seed: int) -> None:
    """Not every sequence samples, and some rows are wanted twice."""
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, 4, 6)
    batch, row_slots = describe(slots.tolist(), [5, 1, 1, 9, 2, 1], [0] * 6)
    for size in (0, 1, 4, 30):
        rows = rng.integers(0, len(row_slots), size)
        check(select(batch, rows), [row_slots[row] for row in rows])
    assert select(None, np.array([0, 3])) is None


def test_the_callers_arrays_are_not_kept() -> None:
    """A step's arrays may be written again while a batch is still in use."""
    slots, query_start = np.array([1, 2]), np.array([0, 1, 2])
    batch = make_batch(slots, np.zeros(2, dtype=np.int64), query_start, np.zeros(2, dtype=np.int64), CPU)
    assert batch is not None
    slots[:] = 7
    assert batch.row_slots.tolist() == batch.host_row_slots.tolist() == [1, 2]
