"""What adapters add, by Triton, for NVIDIA GPUs. Knows tables and tiles; the arithmetic is in
`triton_kernels`.

One shrink and one expand a projection, for all adapters of a step and all slices of a merged projection. A
table is written to the device when its adapters change, in the same memory where its size allows. A row has
the same bits in any company.

What a recorded step launches is for all the room that a place has; programs that find no rows, or no rank,
end at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hybridserve.kernels.lora.interface import ALIGNMENT, CHUNK_ROWS, LoraBackend
from hybridserve.kernels.moe.triton_backend import group_pairs, num_tiles
from hybridserve.kernels.triton_support import cdiv, obstacle, power_of_2, rows_of

if TYPE_CHECKING:
    from hybridserve.kernels.lora.interface import LoraBatch, LoraPair, LoraTable
    from hybridserve.kernels.moe.interface import ExpertGroups
    from hybridserve.kernels.registry import Capabilities

_NAME = "triton"

SPLIT = 1024
"""Inputs that are summed one after another."""

RANKS = 16
"""That a tile has: as few as tensor cores take."""

OUTPUTS = 128

_ENTRY = 8
"""Numbers that describe a pair; see `triton_kernels`."""


class Tiles(NamedTuple):
    rows: torch.Tensor  # of y, in the order of the tiles
    tiles: torch.Tensor  # [n, 3] int32: adapter, where its rows start, how many there are
    block: int  # rows that a tile has at most


class Triton(LoraBackend):
    name = _NAME
    can_be_recorded = True

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        return obstacle(capabilities)

    def __init__(self) -> None:
        from hybridserve.kernels.lora import triton_kernels
        from hybridserve.kernels.moe import triton_kernels as moe_kernels

        self._kernels = triton_kernels
        self._moe_kernels = moe_kernels

    def write(self, table: LoraTable, device: torch.device) -> None:
        if table.room is not None:
            _known(table, device).refresh(table, device)

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        table: LoraTable,
        batch: LoraBatch,
        bias: torch.Tensor | None = None,
    ) -> None:
        if table.concerns(batch):
            self._add(y, x, None, _sizes(table, batch, y.device), _tiles(batch), bias)

    def add_embedding(
        self, y: torch.Tensor, token_ids: torch.Tensor, table: LoraTable, batch: LoraBatch
    ) -> None:
        if not table.concerns(batch):
            return
        known, tiles = _sizes(table, batch, y.device), _tiles(batch)
        u = y.new_empty((1, len(tiles.rows), known.width), dtype=torch.float32)
        self._kernels.embed[(len(tiles.tiles), known.width // RANKS)](
            *(token_ids.contiguous(), tiles.rows, tiles.tiles, known.entries, known.like, u),
            *(known.num_pairs, known.max_rank),
            BLOCK_M=tiles.block,
            BLOCK_R=RANKS,
        )
        self._expand(y, u, known, tiles, None)

    def add_experts(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        x_rows: torch.Tensor | None,
        table: LoraTable,
        batch: LoraBatch,
        groups: ExpertGroups,
    ) -> None:
        if not table.concerns(batch) or not len(y):
            return
        known = _sizes(table, batch, y.device)
        self._add(y, x, x_rows, known, self._expert_tiles(table, batch, groups), None)

    def _expert_tiles(self, table: LoraTable, batch: LoraBatch, groups: ExpertGroups) -> Tiles:
        """Found once a layer, not for each of its two projections."""
        name = f"{_NAME} experts"
        known: tuple[ExpertGroups, int, Tiles] | None = batch.derived.get(name)
        if known is None or known[0] is not groups or known[1] != table.num_groups:
            num_keys = (table.num_slots + 1) * table.num_groups
            keys = batch.row_slots[groups.tokens] * table.num_groups + groups.experts
            grouped = group_pairs(self._moe_kernels, keys, num_keys)
            tiles = keys.new_empty((num_tiles(len(keys), num_keys, CHUNK_ROWS), 3), dtype=torch.int32)
            self._kernels.make_tiles[(len(tiles),)](
                *(grouped.starts, tiles, num_keys), BLOCK_M=CHUNK_ROWS, BLOCK_KEYS=power_of_2(num_keys)
            )
            known = (groups, table.num_groups, Tiles(grouped.order, tiles, CHUNK_ROWS))
            batch.derived[name] = known
        return known[2]

    def _add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        x_rows: torch.Tensor | None,
        known: _Sizes,
        tiles: Tiles,
        bias: torch.Tensor | None,
    ) -> None:
        x = rows_of(x if x.dtype in (known.like.dtype, torch.float32) else x.to(known.like.dtype))
        num_inputs = x.shape[1]
        splits = cdiv(num_inputs, SPLIT)
        u = y.new_empty((splits, len(tiles.rows), known.width), dtype=torch.float32)
        self._kernels.shrink[(len(tiles.tiles), known.width // RANKS, splits)](
            *(
                x,
                tiles.rows if x_rows is None else x_rows,
                tiles.rows,
                tiles.tiles,
                known.entries,
                known.like,
            ),
            *(u, len(tiles.rows), num_inputs, x.stride(0), known.num_pairs, known.max_rank),
            HAS_X_ROWS=x_rows is not None,
            ALIGNED=known.is_aligned,
            PRECISION=known.precision,
            SPLIT=SPLIT,
            BLOCK_M=tiles.block,
            BLOCK_R=RANKS,
            BLOCK_K=128 if x.element_size() == 2 else 64,
        )
        self._expand(y, u, known, tiles, bias)

    def _expand(
        self, y: torch.Tensor, u: torch.Tensor, known: _Sizes, tiles: Tiles, bias: torch.Tensor | None
    ) -> None:
        target = rows_of(y)
        self._kernels.expand[(len(tiles.tiles), known.num_pairs, cdiv(known.max_outputs, OUTPUTS))](
            *(u, tiles.rows, tiles.tiles, known.entries, known.like),
            *(u if bias is None else bias.contiguous(), target, u.shape[1], target.stride(0)),
            *(known.num_pairs, known.max_rank),
            HAS_BASE_BIAS=bias is not None,
            ALIGNED=known.is_aligned,
            PRECISION=known.precision,
            SPLITS=len(u),
            BLOCK_M=tiles.block,
            BLOCK_R=RANKS,
            BLOCK_N=OUTPUTS,
        )
        if target is not y:
            y.copy_(target)


def _tiles(batch: LoraBatch) -> Tiles:
    """Once a step."""
    known: Tiles | None = batch.derived.get(_NAME)
    if known is None:
        longest = max((stop - start for _, start, stop in batch.segments), default=len(batch.row_slots))
        block = min(CHUNK_ROWS, power_of_2(longest, 16))
        known = batch.derived[_NAME] = Tiles(batch.rows, batch.chunks, block)
    return known


def _known(table: LoraTable, device: torch.device) -> _Known:
    known: _Known | None = table.derived.get(_NAME)
    if known is None:
        known = table.derived[_NAME] = _Known(table, device)
    return known


def _sizes(table: LoraTable, batch: LoraBatch, device: torch.device) -> _Sizes:
    """Called in every projection of every step; most often nothing has changed. Nobody is called when a
    recorded step is run: its table has been written before."""
    known = _known(table, device)
    if batch.is_recorded:
        assert known.recorded is not None
        return known.recorded
    if known.version != table.version:
        known.refresh(table, device)
    return known.sizes


class _Sizes(NamedTuple):
    """A table as kernels read it."""

    entries: torch.Tensor  # [adapters, num_pairs, _ENTRY] int64
    like: torch.Tensor  # of the dtype of A and B
    num_pairs: int
    max_rank: int
    max_outputs: int
    is_aligned: bool

    @property
    def width(self) -> int:
        """Rank activations that a row has room for."""
        return self.num_pairs * self.max_rank

    @property
    def precision(self) -> str:
        """Of products with rank activations: those of half precision are as exact in three parts."""
        return "ieee" if self.like.dtype == torch.float32 else "tf32x3"


class _Known:
    """What a table is on the device, and what of it the device has. Its memory moves only where an adapter
    has more pairs than any before it, and never where the table has room."""

    sizes: _Sizes
    """Of the adapters that are there now."""

    def __init__(self, table: LoraTable, device: torch.device) -> None:
        self.version = -1
        self.recorded: _Sizes | None = None
        room = table.room
        if room is not None:
            self._reserve(table, room.num_pairs, device)
            like = torch.empty(1, dtype=room.dtype, device=device)
            rank = cdiv(room.rank, RANKS) * RANKS
            self.recorded = _Sizes(self._entries, like, room.num_pairs, rank, room.num_outputs, True)
        else:
            self._reserve(table, 0, device)

    def _reserve(self, table: LoraTable, num_pairs: int, device: torch.device) -> None:
        shape = ((table.num_slots + 1) * table.num_groups, num_pairs, _ENTRY)
        self._host = np.zeros(shape, dtype=np.int64)
        self._entries = torch.empty(shape, dtype=torch.int64, device=device)
        self.version = -1

    def refresh(self, table: LoraTable, device: torch.device) -> None:
        """Of the slots that have changed."""
        if self.version == table.version:
            return
        if table.room is None:
            adapters = (divmod(i, table.num_groups) for i in range(len(self._host)))
            needed = max(len(table.pairs(*adapter)) for adapter in adapters)
            if needed > self._host.shape[1]:
                self._reserve(table, needed, device)
        for slot, version in enumerate(table.slot_versions):
            if version > self.version:
                self._fill(table, slot)
        host = torch.from_numpy(self._host)
        self._entries.copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)
        self.version = table.version
        max_rank = cdiv(int(self._host[:, :, 6].max(initial=1)), RANKS) * RANKS
        self.sizes = _Sizes(
            self._entries,
            self._like(table, device),
            self._host.shape[1],
            max_rank,
            int(self._host[:, :, 5].max(initial=1)),
            not (self._host[:, :, :2] % ALIGNMENT).any(),
        )

    def _fill(self, table: LoraTable, slot: int) -> None:
        first = slot * table.num_groups
        self._host[first : first + table.num_groups] = 0
        for group in range(table.num_groups):
            for i, pair in enumerate(table.pairs(slot, group)):
                self._host[first + group, i] = _entry(pair)

    def _like(self, table: LoraTable, device: torch.device) -> torch.Tensor:
        if self.recorded is not None:
            return self.recorded.like
        adapters = (divmod(i, table.num_groups) for i in range(len(self._host)))
        pairs = next(pairs for adapter in adapters if (pairs := table.pairs(*adapter)))
        return pairs[0].A


def _entry(pair: LoraPair) -> tuple[int, ...]:
    rank, num_outputs = pair.B.shape
    bias, gain = (0 if tensor is None else tensor.data_ptr() for tensor in (pair.bias, pair.gain))
    scale = int(np.float32(pair.scale).view(np.int32))
    return pair.A.data_ptr(), pair.B.data_ptr(), bias, gain, pair.start, num_outputs, rank, scale
