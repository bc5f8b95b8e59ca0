"""Paged attention in C for a CPU: one call a layer, for all sequences of a step.

Knows how to hand tensors over; the arithmetic is in `native.c`. Results depend neither on the company
nor on the number of threads nor on how a prompt is cut into chunks.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridserve.kernels import native
from hybridserve.kernels.attention.interface import AttentionBackend
from hybridserve.kernels.native import INT, KINDS, POINTER

if TYPE_CHECKING:
    from hybridserve.kernels.attention.interface import AttentionMetadata
    from hybridserve.kernels.registry import Capabilities

SOURCE = Path(__file__).resolve().with_name("native.c")


FUNCTIONS = {
    "paged_attention": (
        *(INT,) * 5,  # tokens, sequences, KV heads, group, size of a head
        *(POINTER, POINTER, POINTER, INT, POINTER),  # what the metadata says
        *(INT, *(POINTER, INT, INT) * 3),  # query, key, value
        *(POINTER, *(INT,) * 7),  # cache
        *(ctypes.c_double, ctypes.c_double, INT, POINTER, INT),
    ),
}
"""What native.c has, by the types of arguments."""


class Native(AttentionBackend):
    """RuntimeError where there is no library: ask `why_not` first."""

    name = "native"
    can_be_recorded = True

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        if capabilities.device != "cpu":
            return "runs on CPUs only"
        return native.obstacle(*cls.sources(capabilities))

    @classmethod
    def sources(cls, capabilities: Capabilities) -> tuple[Path, ...]:
        return (SOURCE,)

    def __init__(self) -> None:
        self._attend = native.load(SOURCE, FUNCTIONS).paged_attention

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
        num_tokens, num_heads, head_dim = query.shape
        _, _, block_size, num_kv_heads, _ = cache.shape
        inputs = [_rows(x, query.dtype) for x in (query, key, value)]
        table = metadata.block_table
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._attend(
            num_tokens,
            len(metadata.query_lens),
            num_kv_heads,
            num_heads // num_kv_heads,
            head_dim,
            metadata.query_start.data_ptr(),
            metadata.seq_lens.data_ptr(),
            table.data_ptr(),
            table.stride(0),
            metadata.slot_mapping.data_ptr(),
            KINDS[query.dtype],
            *(argument for x in inputs for argument in (x.data_ptr(), *x.stride()[:2])),
            cache.data_ptr(),
            KINDS[cache.dtype],
            block_size,
            *cache.stride(),
            scale,
            softcap or 0.0,
            window or 0,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [T, heads, head_dim] in `dtype` with contiguous heads: x itself if it can be."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    return x if x.stride(2) == 1 else x.contiguous()
