"""What became of an adapter's tensors, as those are told who loaded it. Knows no tensors."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class LoadReport(msgspec.Struct, frozen=True):
    """What became of an adapter's tensors."""

    applied: Mapping[str, int]
    """Module -> bytes. Tensors that several experts share count for the first of them. Empty for an adapter
    that is refused: none is applied in part."""
    unused: Mapping[str, str]
    """Key in the file, or name of another file -> why it is not applied: nothing is lost without it, or it is
    never read."""
    unsupported: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Key in the file -> why it can't be applied. Empty for one that was loaded: see `AdapterError`."""

    @property
    def num_bytes(self) -> int:
        return sum(self.applied.values())
