"""One byte buffer, and the strided views through which layers see their part of it (D1, D2); another one in
the host's memory, for units that give way.

Knows bytes; does not know who owns which unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec
from hybridserve.engine.units import size_below, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hybridserve.layers.context import CacheView


SHARE = 7 / 8
"""Of what could be allocated once: something is to be left for what is computed."""


def _allocate(
    num_bytes: int, device: torch.device, key: str, what: str, *, pinned: bool = False
) -> torch.Tensor:
    """Bytes, not initialised. ValueError, with the key and what would fit, where they are not to be had."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    except RuntimeError:
        fitting = _largest(num_bytes, device, pinned=pinned)
        hint = f"; what would fit: {key}: {size_below(fitting)[0]}" if fitting else ""
        raise ValueError(f"{key}: {what} of {size_text(num_bytes)} can't be allocated{hint}") from None


def _largest(num_bytes: int, device: torch.device, *, pinned: bool) -> int:
    """Bytes that can be had, found by trying: the reason may be a limit that no number tells."""
    while (num_bytes := num_bytes * 3 // 4) >= 2**20:
        try:
            torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        except RuntimeError:
            continue
        return int(num_bytes * SHARE)
    return 0


def _units(buffer: torch.Tensor, count: int, stride: int) -> torch.Tensor:
    """[count, stride] bytes."""
    return buffer.as_strided((count, stride), (stride, 1))


def runs(copies: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(source, destination, length) of the copies [N, 2] of which each is one further on both sides than the
    one before, as one."""
    if not len(copies):
        return
    ends = np.flatnonzero((np.diff(copies, axis=0) != 1).any(1)) + 1
    starts = np.concatenate(([0], ends))
    lengths = np.diff(starts, append=len(copies))
    for (source, destination), length in zip(copies[starts].tolist(), lengths.tolist(), strict=True):
        yield source, destination, length


class Arena:
    """All cache memory of one rank.

    The buffer is not initialised: on a CPU its pages are committed when they are first written. Nothing reads
    a unit before it was written: attention reads up to a sequence's length, a recurrence only where
    `has_state`. Raises ValueError if the memory is not to be had.
    """

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        self.layout = layout
        num_bytes = layout.num_slabs * layout.slab_bytes
        self.buffer = _allocate(num_bytes, device, "cache.memory_bytes", "an arena")
        self.blocks = _units(self.buffer, layout.num_slabs * layout.blocks_per_slab, layout.block_stride)
        self.slots = _units(self.buffer, layout.num_slabs * layout.slots_per_slab, layout.slot_stride)
        self.views = [self._view(index) for index in range(len(layout.specs))]

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy whole blocks, all layers at once; every source is read before any destination is written."""
        self.blocks[destinations] = self.blocks[sources]

    def copy_slots(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy whole slots, all layers at once; every source is read before any destination is written."""
        self.slots[destinations] = self.slots[sources]

    def move(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        """Moves [N, 2] of blocks and of slots. Every source of either kind is read before anything is
        written, as a slab may change its kind between the two."""
        if not len(blocks) and not len(slots):
            return
        block_sources, block_destinations = self._upload(blocks).unbind(1)
        slot_sources, slot_destinations = self._upload(slots).unbind(1)
        moved_blocks, moved_slots = self.blocks[block_sources], self.slots[slot_sources]
        self.blocks[block_destinations] = moved_blocks
        self.slots[slot_destinations] = moved_slots

    def _upload(self, pairs: np.ndarray) -> torch.Tensor:
        """From memory that the device can read by itself, so that nobody waits for what it is doing."""
        host = torch.from_numpy(pairs)
        device = self.buffer.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    def _view(self, index: int) -> CacheView:
        layout = self.layout
        spec = layout.specs[index]
        if isinstance(spec, PagedKVSpec):
            shape = (2, layout.block_size, spec.num_kv_heads, spec.head_dim)
            num_blocks = layout.num_slabs * layout.blocks_per_slab
            return self._strided(spec.dtype, layout.kv_offset(index), num_blocks, layout.block_stride, shape)
        num_slots = layout.num_slabs * layout.slots_per_slab
        return tuple(
            self._strided(tensor.dtype, offset, num_slots, layout.slot_stride, tensor.shape)
            for tensor, offset in zip(spec.tensors, layout.state_offsets(index), strict=True)
        )

    def _strided(
        self, dtype_name: str, offset: int, num_units: int, unit_stride: int, shape: Sequence[int]
    ) -> torch.Tensor:
        typed = self.buffer.view(getattr(torch, dtype_name))
        size = typed.element_size()
        strides = [1]
        for length in reversed(shape[1:]):
            strides.insert(0, strides[0] * length)
        return typed.as_strided((num_units, *shape), (unit_stride // size, *strides), offset // size)


class HostArena:
    """Host memory of one rank, cut like its arena: `num_slabs` slabs, of which slab 0 takes no bytes, as it
    is never handed out. Pinned where the device is a GPU; on a CPU pages are committed when first written.

    Copies take their place among the device's other work; nothing waits for them. Raises ValueError if the
    memory is not to be had.
    """

    def __init__(self, layout: CacheLayout, num_slabs: int, device: torch.device) -> None:
        num_usable = num_slabs - 1
        self.buffer = _allocate(
            num_usable * layout.slab_bytes,
            torch.device("cpu"),
            "cache.host_swap_bytes",
            "host memory",
            pinned=device.type == "cuda",
        )
        self.blocks = _units(self.buffer, num_usable * layout.blocks_per_slab, layout.block_stride)
        self.slots = _units(self.buffer, num_usable * layout.slots_per_slab, layout.slot_stride)
        self._first = layout.blocks_per_slab, layout.slots_per_slab  # the units that lie at the beginning

    def swap_out(self, arena: Arena, blocks: np.ndarray, slots: np.ndarray) -> None:
        """Copies [N, 2] of the arena's blocks and slots to those of the host."""
        _copy(arena.blocks, self.blocks, blocks, (0, self._first[0]))
        _copy(arena.slots, self.slots, slots, (0, self._first[1]))

    def swap_in(self, arena: Arena, blocks: np.ndarray, slots: np.ndarray) -> None:
        """Copies [N, 2] of the host's blocks and slots to those of the arena."""
        _copy(self.blocks, arena.blocks, blocks, (self._first[0], 0))
        _copy(self.slots, arena.slots, slots, (self._first[1], 0))


def _copy(
    sources: torch.Tensor, destinations: torch.Tensor, copies: np.ndarray, firsts: tuple[int, int]
) -> None:
    """Of units [N, 2] of one buffer to those of another; `firsts` are the units that their rows begin with.
    IndexError for a unit that has no row."""
    if not len(copies):
        return
    rows = copies - firsts
    if rows.min() < 0 or (rows.max(0) >= (len(sources), len(destinations))).any():
        raise IndexError(f"copies of units that there are not: {copies.tolist()}")
    for source, destination, length in runs(rows):
        target = destinations[destination : destination + length]
        target.copy_(sources[source : source + length], non_blocking=True)
