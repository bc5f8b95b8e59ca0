"""Paged attention by the package flash-attn, where it is installed (arXiv 2307.08691). Knows its interface.

Asked for by name only: it takes pages of 256 tokens, and splits what a row sees by how busy the device is, so
that a row's bits depend on its company.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from hybridserve.kernels.attention.interface import AttentionBackend, AttentionMetadata
from hybridserve.kernels.triton_support import import_obstacle, rows_of

if TYPE_CHECKING:
    from hybridserve.kernels.registry import Capabilities

PAGE = 256
"""Tokens in a page are a multiple of this."""


@dataclass(slots=True)
class FlashMetadata(AttentionMetadata):
    """As the package takes it: int32, and lengths as sums."""

    query_sums: torch.Tensor  # [S + 1]
    key_sums: torch.Tensor  # [S + 1]
    pages: torch.Tensor  # [S, B]


class FlashAttn(AttentionBackend):
    name = "flash_attn"

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        if capabilities.device != "cuda":
            return "no CUDA device"
        if capabilities.dtype not in ("bfloat16", "float16"):
            return f"has no arithmetic for {capabilities.dtype}"
        if capabilities.block_size % PAGE:
            return f"needs a block_size of {PAGE}"
        return import_obstacle("flash_attn", "flash-attn")

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func

        self._attend = flash_attn_varlen_func

    def prepare(self, metadata: AttentionMetadata) -> FlashMetadata:
        return FlashMetadata(
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_table,
            metadata.slot_mapping,
            metadata.query_lens,
            metadata.context_lens,
            query_sums=metadata.query_start.int(),
            key_sums=F.pad(metadata.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            pages=metadata.block_table.int(),
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
        """ValueError for a cache of another dtype than the query's: the package has none for it."""
        if not isinstance(metadata, FlashMetadata):
            raise TypeError("metadata must come from this backend's prepare()")
        if cache.dtype != query.dtype:
            raise ValueError(f"flash-attn needs K and V in {query.dtype}, not {cache.dtype}")
        if not len(query):
            return torch.empty_like(query)
        keys, values = cache.unbind(1)
        place = (metadata.slot_mapping // cache.shape[2], metadata.slot_mapping % cache.shape[2])
        keys.index_put_(place, key)
        values.index_put_(place, value)
        lens = zip(metadata.query_lens, metadata.context_lens, strict=True)
        out: torch.Tensor = self._attend(
            rows_of(query),
            keys,
            values,
            metadata.query_sums,
            metadata.key_sums,
            max(metadata.query_lens),
            max(length + context for length, context in lens),
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
            block_table=metadata.pages,
        )
        return out
