"""Paged attention by Triton, for NVIDIA GPUs. Knows which rows go to which kernel, and how large their tiles
are; the arithmetic is in `triton_kernels`.

Sequences with one token are decoded: what each sees is cut into splits of a fixed length, attended to side by
side and merged in order. All others are prefilled, whether they start, go on or verify drafts. How a sequence
is cut depends on its own lengths alone, so a row has the same bits in any company.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybridserve.kernels.attention.interface import AttentionBackend, AttentionMetadata
from hybridserve.kernels.triton_support import cdiv, obstacle, power_of_2, rows_of, upload

if TYPE_CHECKING:
    from hybridserve.kernels.registry import Capabilities

SPLIT = 512
"""Positions of a split: what merging reads and writes is then a thirtieth of what attending reads."""


class Tile(NamedTuple):
    rows: int  # of queries: tokens times the heads that share a KV head
    columns: int  # positions at once
    num_warps: int
    num_stages: int


LOG2_E = math.log2(math.e)


class Scoring(NamedTuple):
    """How products become scores, as kernels take it: softmax is in base 2."""

    window: int  # 0: none
    scale: float  # to base-2 logarithms or, with a cap, to parts of it
    cap: float  # of base-2 logarithms; 0: none

    @classmethod
    def of(cls, scale: float, window: int | None, softcap: float | None) -> Scoring:
        if softcap is None:
            return cls(window or 0, scale * LOG2_E, 0.0)
        return cls(window or 0, scale / softcap, softcap * LOG2_E)


def decode_tile(group: int, head_dim: int, element_bytes: int) -> Tile:
    """For one token: bytes in flight count, 16 KiB of K a stage."""
    columns = min(128, max(16, 16384 // (power_of_2(head_dim, 16) * element_bytes)))
    return Tile(power_of_2(group, 16), columns, 4 if element_bytes == 2 else 8, 2)


def prefill_tile(group: int, head_dim: int, element_bytes: int, *, is_capped: bool = False) -> Tile:
    """As many rows as registers hold in float32: 128 up to a head of 128, 64 of 256 or of float32 operands,
    whose products no tensor core takes: they hold few columns, for many warps. Four warps have no register
    left for a cap."""
    wide = power_of_2(head_dim, 16)
    if element_bytes == 4:
        return Tile(power_of_2(group, 64), 16, 8, 2)
    rows = power_of_2(group, 128 if wide <= 128 else 64)
    return Tile(rows, 64 if wide <= 128 else 32, 8 if is_capped or rows * wide >= 128 * 128 else 4, 2)


@dataclass(slots=True)
class TritonMetadata(AttentionMetadata):
    """`num_seen` is the largest number of positions that a sequence with one token sees."""

    singles: torch.Tensor | None = None  # [n] int32: sequences with one token
    num_seen: int = 0
    tiles: dict[int, torch.Tensor] = field(default_factory=dict)
    """By tokens of a tile, [n, 2] int32: sequence and first token of each tile of the other sequences."""

    def cut(self, tokens: int) -> torch.Tensor | None:
        """The tiles, made when the first layer asks for them; None if there are none."""
        if tokens not in self.tiles:
            rows = [
                (sequence, first)
                for sequence, length in enumerate(self.query_lens)
                if length > 1
                for first in range(0, length, tokens)
            ]
            if not rows:
                return None
            self.tiles[tokens] = upload(rows, self.seq_lens.device)
        return self.tiles[tokens]


class Triton(AttentionBackend):
    name = "triton"
    can_be_recorded = True

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        return obstacle(capabilities)

    def __init__(self) -> None:
        from hybridserve.kernels.attention import triton_kernels

        self._kernels = triton_kernels

    def prepare(self, metadata: AttentionMetadata) -> TritonMetadata:
        singles = [i for i, length in enumerate(metadata.query_lens) if length == 1]
        return TritonMetadata(
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_table,
            metadata.slot_mapping,
            metadata.query_lens,
            metadata.context_lens,
            singles=upload(singles, metadata.seq_lens.device) if singles else None,
            num_seen=max((metadata.context_lens[i] + 1 for i in singles), default=0),
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if not isinstance(metadata, TritonMetadata):
            raise TypeError("metadata must come from this backend's prepare()")
        query, key, value = rows_of(query), rows_of(key), rows_of(value)
        out = query.new_empty(query.shape)
        num_tokens, num_heads, head_dim = query.shape
        block_size, num_kv_heads = cache.shape[2:4]
        if not num_tokens:
            return out
        block = power_of_2(num_kv_heads * head_dim)
        self._kernels.write_kv[(num_tokens,)](
            *(
                key,
                value,
                cache,
                metadata.slot_mapping,
                *key.stride()[:2],
                *value.stride()[:2],
                *cache.stride(),
            ),
            BLOCK_SIZE=block_size,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK=block,
            num_warps=min(8, max(1, block // 256)),
        )
        shape = {
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "HAS_WINDOW": window is not None,
            "BLOCK_D": power_of_2(head_dim, 16),
        }
        scoring = Scoring.of(scale, window, softcap)
        if metadata.singles is not None:
            self._decode(query, cache, out, metadata, scoring, shape)
        self._prefill(query, cache, out, metadata, scoring, shape)
        return out

    def _decode(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        metadata: TritonMetadata,
        scoring: Scoring,
        shape: dict[str, Any],
    ) -> None:
        assert metadata.singles is not None
        _, num_heads, head_dim = query.shape
        num_kv_heads = cache.shape[3]
        group = num_heads // num_kv_heads
        tile = decode_tile(group, head_dim, query.element_size())
        num_seqs = len(metadata.singles)
        seen = min(metadata.num_seen, scoring.window or metadata.num_seen)
        num_splits = cdiv(seen, SPLIT)
        parts = (out, out)
        if num_splits > 1:
            size = (num_seqs, num_splits, num_heads)
            parts = (
                out.new_empty((*size, head_dim), dtype=torch.float32),
                out.new_empty(size, dtype=torch.float32),
            )
        facts = (metadata.singles, metadata.query_start, metadata.seq_lens)
        self._kernels.decode[(num_seqs, num_kv_heads, num_splits)](
            *(query, cache, out, *parts, *facts, metadata.block_table),
            *(num_splits, metadata.block_table.stride(0), *scoring),
            *(*query.stride()[:2], *cache.stride()),
            HAS_CAP=scoring.cap != 0,
            GROUP=group,
            BLOCK_SIZE=cache.shape[2],
            ONE_SPLIT=num_splits == 1,
            SPLIT=SPLIT,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **shape,
        )
        if num_splits > 1:
            self._kernels.merge[(num_seqs, num_heads)](
                *(*parts, out, *facts, num_splits, scoring.window), SPLIT=SPLIT, num_warps=1, **shape
            )

    def _prefill(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        metadata: TritonMetadata,
        scoring: Scoring,
        shape: dict[str, Any],
    ) -> None:
        _, num_heads, head_dim = query.shape
        num_kv_heads = cache.shape[3]
        group = num_heads // num_kv_heads
        tile = prefill_tile(group, head_dim, query.element_size(), is_capped=scoring.cap != 0)
        tokens = tile.rows // group
        tiles = metadata.cut(tokens)
        if tiles is None:
            return
        self._kernels.prefill[(len(tiles), num_kv_heads)](
            *(query, cache, out, tiles, metadata.query_start, metadata.seq_lens, metadata.block_table),
            *(metadata.block_table.stride(0), *scoring, *query.stride()[:2], *cache.stride()),
            HAS_CAP=scoring.cap != 0,
            GROUP=group,
            BLOCK_SIZE=cache.shape[2],
            TOKENS=tokens,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **shape,
        )
