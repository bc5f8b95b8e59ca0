"""One byte buffer, and the strided views through which layers see their part of it (D1, D2).

Knows bytes; does not know who owns which unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec
from hybridserve.engine.units import size_below, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.layers.context import CacheView


SHARE = 7 / 8
"""Of what could be allocated once: something is to be left for what is computed."""


def _largest(num_bytes: int, device: torch.device) -> int:
    """Bytes of an arena that can be had, found by trying: the reason may be a limit that no number tells."""
    while (num_bytes := num_bytes * 3 // 4) >= 2**20:
        try:
            torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError:
            continue
        return int(num_bytes * SHARE)
    return 0


class Arena:
    """All cache memory of one rank.

    The buffer is not initialised: on a CPU its pages are committed when they are first written. Nothing reads
    a unit before it was written: attention reads up to a sequence's length, a recurrence only where
    `has_state`. Raises ValueError if the memory is not to be had.
    """

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        self.layout = layout
        num_bytes = layout.num_slabs * layout.slab_bytes
        try:
            self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError:
            fitting = _largest(num_bytes, device)
            hint = f"; what would fit: cache.memory_bytes: {size_below(fitting)[0]}" if fitting else ""
            raise ValueError(
                f"cache.memory_bytes: an arena of {size_text(num_bytes)} can't be allocated{hint}"
            ) from None
        self.blocks = self._units(layout.blocks_per_slab, layout.block_stride)
        self.slots = self._units(layout.slots_per_slab, layout.slot_stride)
        self.views = [self._view(index) for index in range(len(layout.specs))]

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy whole blocks, all layers at once; every source is read before any destination is written."""
        self.blocks[destinations] = self.blocks[sources]

    def copy_slots(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy whole slots, all layers at once; every source is read before any destination is written."""
        self.slots[destinations] = self.slots[sources]

    def _units(self, per_slab: int, stride: int) -> torch.Tensor:
        """[num_units, stride] bytes."""
        return self.buffer.as_strided((self.layout.num_slabs * per_slab, stride), (stride, 1))

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
