"""The descriptor of a step's adapters, against a definition row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hybridserve.kernels.lora.interface import CHUNK_ROWS, LoraBatch, Segment
from hybridserve.lora.batch import RecordedBatch, make_batch, rows_with_adapters, select

if TYPE_CHECKING:
    from collections.abc import Sequence


def describe(
    slots: Sequence[int], lengths: Sequence[int], starts: Sequence[int], begins: Sequence[int] | None = None
) -> tuple[LoraBatch | None, list[int]]:
    """The batch of sequences of these lengths that are at position `begins`; and each row's slot."""
    begins = begins or [0] * len(slots)
    positions = [begin + i for begin, length in zip(begins, lengths, strict=True) for i in range(length)]
    batch = make_batch(
        rows_with_adapters(
            np.array(slots, dtype=np.int64),
            np.array(starts, dtype=np.int64),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array(positions, dtype=np.int64),
        ),
        torch.from_numpy,
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
        check(select(batch, rows, torch.from_numpy), [row_slots[row] for row in rows])
    assert select(None, np.array([0, 3]), torch.from_numpy) is None


def test_the_callers_arrays_are_not_kept() -> None:
    """A step's arrays may be written again while a batch is still in use."""
    slots, query_start = np.array([1, 2]), np.array([0, 1, 2])
    zeros = np.zeros(2, dtype=np.int64)
    batch = make_batch(rows_with_adapters(slots, zeros, query_start, zeros), torch.from_numpy)
    assert batch is not None
    slots[:] = 7
    assert batch.row_slots.tolist() == batch.host_row_slots.tolist() == [1, 2]


@pytest.mark.parametrize("num_slots", [1, 4, 40])
@pytest.mark.parametrize("size", [1, 2, 7, 40, 70])
def test_l014_a_recorded_batch_is_loaded_where_it_is(size: int, num_slots: int) -> None:
    """Row counts go up and down and adapters change, some steps have none; the tensors stay the same ones,
    and nothing of an earlier step is left in what a smaller one doesn't fill."""
    rng = np.random.default_rng(size)
    memory = torch.full((RecordedBatch.num_words(size, num_slots) + 3,), -1)
    recorded = RecordedBatch(memory, size, num_slots)
    batch = recorded.batch
    places = [each.data_ptr() for each in (batch.row_slots, batch.rows, batch.chunks)]
    assert all(place % 16 == memory.data_ptr() % 16 for place in places)
    for num_rows in [size, *rng.integers(1, size + 1, 20).tolist(), size]:
        row_slots = rng.integers(0, num_slots + 1, num_rows) * (rng.random() < 0.8)
        if rng.random() < 0.3:
            row_slots = np.full(num_rows, rng.integers(1, num_slots + 1))  # the longest segment
        recorded.load(torch.from_numpy(recorded.describe(row_slots)))
        assert batch.row_slots.tolist() == [*row_slots.tolist(), *[0] * (size - num_rows)]
        covered = []
        for slot, start, count in batch.chunks.tolist():
            rows = batch.rows[start : start + count].tolist()
            assert slot or not rows
            assert len(rows) == count <= CHUNK_ROWS
            assert {int(row_slots[row]) for row in rows} <= {slot}
            covered += rows
        assert sorted(covered) == np.flatnonzero(row_slots).tolist()
    assert places == [each.data_ptr() for each in (batch.row_slots, batch.rows, batch.chunks)]
    assert memory[-3:].tolist() == [-1] * 3
