"""Which rows of a step use which adapter: built on the host, copied to the device once.

Knows arrays; knows no request and no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from hybridserve.kernels.lora.interface import CHUNK_ROWS, LoraBatch, Segment

if TYPE_CHECKING:
    import numpy.typing as npt

Put = Callable[[np.ndarray], torch.Tensor]
"""Gives an array's place on the device."""


def rows_with_adapters(
    adapter_slots: npt.NDArray[np.int64],  # [S], 0 for none
    adapter_start: npt.NDArray[np.int64],  # [S]: the position from which a sequence's adapter is on
    query_start: npt.NDArray[np.int64],  # [S + 1]
    positions: npt.NDArray[np.int64],  # [T]
) -> npt.NDArray[np.int64] | None:
    """The adapter slot of each of `T` rows of `S` sequences, 0 for none; None if no row has an adapter."""
    if not adapter_slots.any():
        return None
    lengths = np.diff(query_start)
    row_slots = np.repeat(adapter_slots, lengths)
    row_slots[positions < np.repeat(adapter_start, lengths)] = 0
    return row_slots if row_slots.any() else None


def make_batch(row_slots: npt.NDArray[np.int64] | None, put: Put) -> LoraBatch | None:
    """Describe a step whose rows have these slots [T]; None for None, and if no row has an adapter."""
    if row_slots is None:
        return None
    rows, segments = _grouped(row_slots)
    if not segments:
        return None
    chunks = _chunks(segments)
    num_rows = len(row_slots)
    first_chunk = num_rows + len(rows)
    packed = np.empty(first_chunk + (chunks.size + 1) // 2, dtype=np.int64)
    packed[:num_rows] = row_slots
    packed[num_rows:first_chunk] = rows
    packed[first_chunk:].view(np.int32)[: chunks.size] = chunks.ravel()
    on_device = put(packed)
    return LoraBatch(
        row_slots=on_device[:num_rows],
        rows=on_device[num_rows:first_chunk],
        segments=segments,
        chunks=on_device[first_chunk:].view(torch.int32)[: chunks.size].view(-1, 3),
        host_row_slots=row_slots,
    )


def select(batch: LoraBatch | None, rows: npt.NDArray[np.int64], put: Put) -> LoraBatch | None:
    """The batch of some of a batch's rows [R], in the order given, such as those whose logits are wanted."""
    return None if batch is None else make_batch(batch.host_row_slots[rows], put)


class RecordedBatch:
    """The batch that steps of up to `size` rows are recorded with: views of memory that never moves, into
    which each step is loaded. What a step doesn't fill are rows without an adapter and chunks without
    rows."""

    def __init__(self, memory: torch.Tensor, size: int, num_slots: int) -> None:
        """memory: [`num_words` of them or more] int64."""
        self._size = size
        self._stride = _stride(size)
        self._num_chunks = _num_chunks(size, num_slots)
        self._memory = memory[: self.num_words(size, num_slots)].zero_()
        chunks = self._memory[2 * self._stride :].view(torch.int32)
        self.batch = LoraBatch(
            row_slots=self._memory[:size],
            rows=self._memory[self._stride : self._stride + size],
            segments=[],
            chunks=chunks[: 3 * self._num_chunks].view(-1, 3),
            host_row_slots=np.zeros(0, dtype=np.int64),
            is_recorded=True,
        )

    @staticmethod
    def num_words(size: int, num_slots: int) -> int:
        return 2 * _stride(size) + -(-3 * _num_chunks(size, num_slots) // 2)

    def describe(self, row_slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What is to be loaded for a step whose rows, `size` of them or fewer, have these slots."""
        rows, segments = _grouped(row_slots)
        chunks = _chunks(segments)
        packed = np.zeros(len(self._memory), dtype=np.int64)
        packed[: len(row_slots)] = row_slots
        packed[self._stride : self._stride + len(rows)] = rows
        packed[2 * self._stride :].view(np.int32)[: chunks.size] = chunks.ravel()
        return packed

    def load(self, described: torch.Tensor) -> None:
        self._memory.copy_(described)


def _stride(size: int) -> int:
    """Numbers from one array to the next: each begins at a multiple of 16 bytes."""
    return size + size % 2


def _num_chunks(size: int, num_slots: int) -> int:
    """That `size` rows of `num_slots` adapters can have."""
    return min(size, size // CHUNK_ROWS + min(size, num_slots))


def _grouped(row_slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], list[Segment]]:
    """The rows that have an adapter, by its slot, and where each slot's stand among them."""
    order = np.argsort(row_slots, kind="stable")
    slots, starts = np.unique(row_slots[order], return_index=True)
    num_without = int(np.searchsorted(row_slots[order], 1))
    rows = order[num_without:]
    if not len(rows):
        return rows, []
    starts = (starts - num_without)[slots > 0]
    slots = slots[slots > 0]
    stops = np.append(starts[1:], len(rows))
    return rows, [
        Segment(*facts) for facts in zip(slots.tolist(), starts.tolist(), stops.tolist(), strict=True)
    ]


def _chunks(segments: list[Segment]) -> npt.NDArray[np.int32]:
    """[C, 3]: slot, start, number of rows."""
    return np.array(
        [
            (slot, first, min(CHUNK_ROWS, stop - first))
            for slot, start, stop in segments
            for first in range(start, stop, CHUNK_ROWS)
        ],
        dtype=np.int32,
    ).reshape(-1, 3)
