"""One byte buffer, and the strided views through which layers see their part of it (D1, D2).

Knows bytes; does not know who owns which unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch

from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.layers.context import CacheView


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
            available = psutil.virtual_memory().available
            raise ValueError(
                f"cache.memory_bytes: an arena of {num_bytes / 2**30:,.1f} GiB can't be allocated; "
                f"{available / 2**30:,.1f} GiB are available"
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
