"""Which rows of a step use which adapter: built on the host, copied to the device once.

Knows arrays; knows no request and no weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hybridserve.kernels.lora.interface import CHUNK_ROWS, LoraBatch, Segment

if TYPE_CHECKING:
    import numpy.typing as npt


def make_batch(
    adapter_slots: npt.NDArray[np.int64],  # [S], 0 for none
    adapter_start: npt.NDArray[np.int64],  # [S]: the position from which a sequence's adapter is on
    query_start: npt.NDArray[np.int64],  # [S + 1]
    positions: npt.NDArray[np.int64],  # [T]
    device: torch.device,
) -> LoraBatch | None:
    """Describe a step of `T` rows of `S` sequences; None if no row has an adapter."""
    if not adapter_slots.any():
        return None
    lengths = np.diff(query_start)
    row_slots = np.repeat(adapter_slots, lengths)
    row_slots[positions < np.repeat(adapter_start, lengths)] = 0
    return _describe(row_slots, device)


def select(batch: LoraBatch | None, rows: npt.NDArray[np.int64]) -> LoraBatch | None:
    """The batch of some of a batch's rows [R], in the order given, such as those whose logits are wanted."""
    return None if batch is None else _describe(batch.host_row_slots[rows], batch.row_slots.device)


def _describe(row_slots: npt.NDArray[np.int64], device: torch.device) -> LoraBatch | None:
    order = np.argsort(row_slots, kind="stable")
    slots, starts = np.unique(row_slots[order], return_index=True)
    num_without = int(np.searchsorted(row_slots[order], 1))
    rows = order[num_without:]
    if not len(rows):
        return None
    starts = (starts - num_without)[slots > 0]
    slots = slots[slots > 0]
    stops = np.append(starts[1:], len(rows))
    segments = [
        Segment(*facts) for facts in zip(slots.tolist(), starts.tolist(), stops.tolist(), strict=True)
    ]
    chunks = np.array(
        [
            (slot, first, min(CHUNK_ROWS, stop - first))
            for slot, start, stop in segments
            for first in range(start, stop, CHUNK_ROWS)
        ],
        dtype=np.int32,
    )
    num_rows = len(row_slots)
    first_chunk = num_rows + len(rows)
    packed = np.empty(first_chunk + (chunks.size + 1) // 2, dtype=np.int64)
    packed[:num_rows] = row_slots
    packed[num_rows:first_chunk] = rows
    packed[first_chunk:].view(np.int32)[: chunks.size] = chunks.ravel()
    host = torch.from_numpy(packed)
    if device.type == "cuda":
        host = host.pin_memory()  # else the copy may wait for the device
    on_device = host.to(device, non_blocking=True)
    return LoraBatch(
        row_slots=on_device[:num_rows],
        rows=on_device[num_rows:first_chunk],
        segments=segments,
        chunks=on_device[first_chunk:].view(torch.int32)[: chunks.size].view(-1, 3),
        host_row_slots=row_slots,
    )
