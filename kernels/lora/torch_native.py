"""What adapters add, out of torch operations, for any device. Knows tensors; knows no model.

Rows are sorted by adapter once a step; each adapter is then one pair of matrix multiplications on its rows,
which are a slice wherever they stand together. A and B are never gathered by token.

A decode batch in half precision would pay more for widening A and B than for multiplying by them. There the
adapters of the batch are laid side by side in float32, once for each set of adapters, and all rows go through
one pair of products; of its rank activations each row keeps those of its own adapter.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from hybridserve.kernels.lora.interface import LoraBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hybridserve.kernels.lora.interface import LoraBatch, LoraPair, LoraTable
    from hybridserve.kernels.moe.interface import ExpertGroups

_PACKED_ROWS = 64
"""A batch of more rows is not decoding: multiplying every row by every adapter costs more than widening."""

_PACKED_RANK = 256
"""Ranks of all adapters of a batch together: above it, too."""

_NAME = "torch_native"

Rows = slice | torch.Tensor
"""Some rows of a batch, in order."""


class TorchNative(LoraBackend):
    name = _NAME

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        table: LoraTable,
        batch: LoraBatch,
        bias: torch.Tensor | None = None,
    ) -> None:
        if not table.concerns(batch):
            return
        if (pack := _pack(table, batch)) is not None:
            _add_packed(y, x, pack, batch)
            return
        for slot, rows in _segment_rows(batch):
            if pairs := table.pairs(slot):
                inputs = x[rows].float()
                _add(y, rows, ((torch.mm(inputs, pair.A.float().t()), pair) for pair in pairs), bias)

    def add_embedding(
        self, y: torch.Tensor, token_ids: torch.Tensor, table: LoraTable, batch: LoraBatch
    ) -> None:
        if not table.concerns(batch):
            return
        for slot, rows in _segment_rows(batch):
            if pairs := table.pairs(slot):
                tokens = token_ids[rows]
                _add(y, rows, ((_embed(pair.A, tokens), pair) for pair in pairs), None)

    def add_experts(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        x_rows: torch.Tensor | None,
        table: LoraTable,
        batch: LoraBatch,
        groups: ExpertGroups,
    ) -> None:
        if not table.concerns(batch):
            return
        for slot, expert, rows in _expert_rows(batch, groups):
            if pairs := table.pairs(slot, expert):
                inputs = x[rows if x_rows is None else x_rows[rows]].float()
                _add(y, rows, ((torch.mm(inputs, pair.A.float().t()), pair) for pair in pairs), None)


def _add(
    y: torch.Tensor,
    rows: Rows,
    activations: Iterable[tuple[torch.Tensor, LoraPair]],
    base_bias: torch.Tensor | None,
) -> None:
    """y[rows] += what the pairs make of their rank activations [rows, r] in float32."""
    for u, pair in activations:
        columns = slice(pair.start, pair.start + pair.B.shape[1])
        part = y[:, columns]
        base = part[rows]
        if pair.gain is None and pair.bias is None:
            total = torch.addmm(base.float(), u, pair.B.float(), alpha=pair.scale)
        else:
            total = torch.mm(u, pair.B.float()).mul_(pair.scale)
            if pair.gain is not None:
                plain = base.float() if base_bias is None else base.float() - base_bias[columns].float()
                total.addcmul_(plain, pair.gain)
            if pair.bias is not None:
                total.add_(pair.bias)
            total.add_(base)
        part[rows] = total.to(y.dtype)


def _embed(A: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of A [vocab, r] in float32; zeros for a token of -1."""
    if not len(A):
        return A.new_zeros(len(tokens), A.shape[1], dtype=torch.float32)
    elsewhere = (tokens < 0).unsqueeze(1)
    return A[tokens.clamp(min=0)].float().masked_fill_(elsewhere, 0)


def _segment_rows(batch: LoraBatch) -> list[tuple[int, Rows]]:
    """The slot and the rows of each segment; found once a step."""
    known: list[tuple[int, Rows]] | None = batch.derived.get(_NAME)
    if known is None:
        order = batch.rows.tolist()
        known = [(slot, _rows(batch.rows, order, start, stop)) for slot, start, stop in batch.segments]
        batch.derived[_NAME] = known
    return known


def _rows(rows: torch.Tensor, order: list[int], start: int, stop: int) -> Rows:
    """Entries `start .. stop` of ascending rows, as a slice if they stand together."""
    first, last = order[start], order[stop - 1]
    return slice(first, last + 1) if last - first == stop - start - 1 else rows[start:stop]


def _expert_rows(batch: LoraBatch, groups: ExpertGroups) -> list[tuple[int, int, Rows]]:
    """(slot, expert, rows of the (token, expert) pairs) for those that have rows; found once a layer, not for
    each of its two projections."""
    name = f"{_NAME} experts"
    known: tuple[ExpertGroups, list[tuple[int, int, Rows]]] | None = batch.derived.get(name)
    if known is None or known[0] is not groups:
        known = (groups, list(_find_expert_rows(batch, groups)))
        batch.derived[name] = known
    return known[1]


def _find_expert_rows(batch: LoraBatch, groups: ExpertGroups) -> Iterator[tuple[int, int, Rows]]:
    slots = batch.row_slots[groups.tokens]
    rows = slots.nonzero()[:, 0]
    width = max(batch.slots) + 1
    keys, order = (groups.experts[rows] * width + slots[rows]).sort(stable=True)
    rows = rows[order]
    in_order = rows.tolist()
    start = 0
    for key, count in enumerate(torch.bincount(keys).tolist()):
        if count:
            yield key % width, key // width, _rows(rows, in_order, start, start + count)
            start += count


_Spans = tuple[tuple[int, int, int], ...]
"""(slot, start, stop) of the ranks of each adapter."""


class _Pack(NamedTuple):
    """The adapters of a decode batch side by side."""

    A: torch.Tensor  # [sum of ranks, in] float32
    B: torch.Tensor  # [sum of ranks, out] float32, scaled
    columns: slice  # of y that they concern
    spans: _Spans


def _pack(table: LoraTable, batch: LoraBatch) -> _Pack | None:
    """None where segments are the better way. A table keeps the pack of the last set of adapters only."""
    if len(batch.rows) > _PACKED_ROWS:
        return None
    key = (table.version, batch.slots)
    known: tuple[tuple[int, frozenset[int]], _Pack | None] | None = table.derived.get(_NAME)
    if known is None or known[0] != key:
        known = (key, _make_pack(table, batch))
        table.derived[_NAME] = known
    return known[1]


def _make_pack(table: LoraTable, batch: LoraBatch) -> _Pack | None:
    placed = [(slot, pair) for slot, _, _ in batch.segments for pair in table.pairs(slot)]
    ranks = [pair.A.shape[0] for _, pair in placed]
    if (
        sum(ranks) > _PACKED_RANK
        or placed[0][1].A.dtype == torch.float32
        or any(pair.gain is not None or pair.bias is not None for _, pair in placed)
    ):
        return None
    first = min(pair.start for _, pair in placed)
    last = max(pair.start + pair.B.shape[1] for _, pair in placed)
    A = torch.cat([pair.A for _, pair in placed]).float()
    B = A.new_zeros(sum(ranks), last - first)
    spans = []
    for (slot, pair), (start, stop) in zip(placed, pairwise(_ends(ranks)), strict=True):
        columns = slice(pair.start - first, pair.start - first + pair.B.shape[1])
        torch.mul(pair.B.float(), pair.scale, out=B[start:stop, columns])
        spans.append((slot, start, stop))
    return _Pack(A, B, slice(first, last), tuple(spans))


def _ends(sizes: list[int]) -> list[int]:
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return ends


def _add_packed(y: torch.Tensor, x: torch.Tensor, pack: _Pack, batch: LoraBatch) -> None:
    rows = _all_rows(batch)
    u = torch.mm(x[rows].float(), pack.A.t()).masked_fill_(_others(pack, batch), 0)
    part = y[:, pack.columns]
    part[rows] = torch.addmm(part[rows].float(), u, pack.B).to(y.dtype)


def _all_rows(batch: LoraBatch) -> Rows:
    name = f"{_NAME} rows"
    known: Rows | None = batch.derived.get(name)
    if known is None:
        rows = batch.rows.sort().values
        known = _rows(rows, rows.tolist(), 0, len(rows))
        batch.derived[name] = known
    return known


def _others(pack: _Pack, batch: LoraBatch) -> torch.Tensor:
    """[rows, sum of ranks]: which rank activations of a row are another adapter's."""
    masks: dict[_Spans, torch.Tensor] = batch.derived.setdefault(f"{_NAME} masks", {})
    mask = masks.get(pack.spans)
    if mask is None:
        slots = batch.row_slots[_all_rows(batch)].unsqueeze(1)
        owners = [slot for slot, start, stop in pack.spans for _ in range(start, stop)]
        mask = slots != torch.tensor(owners, device=slots.device)
        masks[pack.spans] = mask
    return mask
